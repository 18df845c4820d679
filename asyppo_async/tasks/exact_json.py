"""JSON that gives back tuples and non-string keys as they were: some scorers compare `(1, 2)` with `==`."""

import json
from typing import cast

from asyppo_async.errors import TaskError
from asyppo_async.tasks.protocol import JsonValue

_TUPLE, _ITEMS = "__tuple__", "__items__"


def dump_exact(value: object) -> str:
    """
    Raises:
        TaskError: a part is neither a plain value, a list, a tuple nor a dict of such.
    """
    return json.dumps(_tagged(value), sort_keys=False)


def load_exact(document: str) -> object:
    """
    Raises:
        TaskError: `document` is no JSON.
    """
    try:
        return _untagged(json.loads(document))
    except json.JSONDecodeError as error:
        raise TaskError(f"the stored answer is no JSON document: {document[:200]!r} ({error})") from error


def _tagged(value: object) -> JsonValue:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return {_TUPLE: [_tagged(item) for item in value]}
    if isinstance(value, list):
        return [_tagged(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and not {_TUPLE, _ITEMS} & value.keys():
            return {str(key): _tagged(item) for key, item in value.items()}
        return {_ITEMS: [[_tagged(key), _tagged(item)] for key, item in value.items()]}
    raise TaskError(f"an answer must be made of plain values, got {type(value).__name__}: {value!r:.200}")


def _untagged(value: JsonValue) -> object:
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TUPLE}:
        return tuple(_untagged(item) for item in cast(list[JsonValue], value[_TUPLE]))
    if value.keys() == {_ITEMS}:
        pairs = cast(list[list[JsonValue]], value[_ITEMS])
        return {_untagged(key): _untagged(item) for key, item in pairs}
    return {key: _untagged(item) for key, item in value.items()}
