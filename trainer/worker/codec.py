"""Messages as frames: one JSON header, then the raw bytes of each array. No pickle; arrays are not copied.

The header is checked against the message's own annotations, so that what arrives is either the message or an error.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import (
    ClassVar,
    Literal,
    Protocol,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
from numpy.typing import NDArray

from asyppo_async.errors import WorkerError
from asyppo_async.trainer.worker import control, messages, session_messages

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None
FrameBuffer: TypeAlias = bytes | memoryview
"""One frame's bytes."""


class Message(Protocol):
    """Any dataclass of `messages`, `session_messages` or `control`."""

    __dataclass_fields__: ClassVar[dict[str, "dataclasses.Field[object]"]]


M = TypeVar("M", bound=Message)

_KINDS: Mapping[str, type[Message]] = {
    kind.__name__: cast(type[Message], kind)
    for module in (messages, control, session_messages)
    for kind in vars(module).values()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind)
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A message with what belongs to its delivery."""

    request_id: int
    """Of the request, its acknowledgement and its answer; 0 for what is neither."""
    deadline_s: float
    """Seconds that the sender of a request will wait; 0 for what has no answer."""
    message: Message


class _Malformed(Exception):
    """What a header or a frame has wrong."""


def encode(message: Message, *, request_id: int = 0, deadline_s: float = 0.0) -> list[FrameBuffer]:
    """Header and array frames. The arrays are those of the message: they must not be written until it has arrived."""
    arrays: list[FrameBuffer] = []
    header = {
        "kind": type(message).__name__,
        "request_id": request_id,
        "deadline_s": deadline_s,
        "body": _plain(message, arrays),
    }
    return [json.dumps(header, separators=(",", ":")).encode(), *arrays]


def decode(frames: Sequence[FrameBuffer]) -> Envelope:
    """The message in `frames`; its arrays are read-only views of them.

    Raises:
        WorkerError: the frames are not a message, with what is wrong.
    """
    try:
        if not frames:
            raise _Malformed("it has no frames")
        header = json.loads(bytes(frames[0]))
        if not isinstance(header, dict) or header.get("kind") not in _KINDS:
            raise _Malformed("its header names no known kind of message")
        request_id = cast(int, _value(header.get("request_id"), int, (), "request_id"))
        deadline_s = cast(float, _value(header.get("deadline_s"), float, (), "deadline_s"))
        arrays = frames[1:]
        kind = _KINDS[header["kind"]]
        message = _message(header.get("body"), kind, arrays, kind.__name__)
        if header.get("body") is not None and _count_arrays(header["body"]) != len(arrays):
            raise _Malformed(f"{kind.__name__} comes with {len(arrays)} arrays")
    except (_Malformed, ValueError, RecursionError) as error:
        raise WorkerError(f"a malformed message was refused: {error}") from error
    return Envelope(request_id=request_id, deadline_s=deadline_s, message=message)


def expect(message: Message, kind: type[M]) -> M:
    """`message`, known to be of `kind`."""
    if not isinstance(message, kind):
        raise WorkerError(f"expected {kind.__name__}, got {type(message).__name__}")
    return message


def _plain(value: object, arrays: list[FrameBuffer]) -> Json:
    if isinstance(value, np.ndarray):
        arrays.append(np.ascontiguousarray(value).data.cast("B") if value.size else b"")
        return {"array": len(arrays) - 1, "dtype": value.dtype.name, "shape": list(value.shape)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name), arrays) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(item, arrays) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a message cannot hold a {type(value).__name__}")


def _message(body: object, kind: type[Message], arrays: Sequence[FrameBuffer], where: str) -> Message:
    if not isinstance(body, dict):
        raise _Malformed(f"{where} must be an object")
    hints = get_type_hints(kind)
    if set(body) != set(hints):
        raise _Malformed(f"{where} has fields {sorted(body)}, expected {sorted(hints)}")
    fields = {name: _value(body[name], hint, arrays, f"{where}.{name}") for name, hint in hints.items()}
    return kind(**fields)


def _value(value: object, hint: object, arrays: Sequence[FrameBuffer], where: str) -> object:
    """`value` as the annotation `hint` says, or `_Malformed`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        (needed,) = (argument for argument in arguments if argument is not NoneType)
        return None if value is None else _value(value, needed, arrays, where)
    if origin is tuple and isinstance(value, list):
        return tuple(
            _value(item, arguments[0], arrays, f"{where}[{index}]") for index, item in enumerate(value)
        )
    if origin is np.ndarray:
        return _array(value, np.dtype(get_args(arguments[1])[0]), arrays, where)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _message(value, cast(type[Message], hint), arrays, where)
    return _scalar(value, hint, where)


def _scalar(value: object, hint: object, where: str) -> object:
    if get_origin(hint) is Literal and value in get_args(hint):
        return value
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and type(value) is hint:
        return value
    raise _Malformed(f"{where} is a {type(value).__name__}, expected {hint}")


def _array(
    value: object, dtype: np.dtype[np.generic], arrays: Sequence[FrameBuffer], where: str
) -> NDArray[np.generic]:
    if not isinstance(value, dict):
        raise _Malformed(f"{where} must describe an array")
    index, shape = value.get("array"), value.get("shape")
    if value.get("dtype") != dtype.name:
        raise _Malformed(f"{where} is of type {value.get('dtype')}, expected {dtype.name}")
    if type(index) is not int or not 0 <= index < len(arrays):
        raise _Malformed(f"{where} refers to frame {index} of {len(arrays)}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise _Malformed(f"{where} has shape {shape!r}")
    num_bytes = math.prod(shape) * dtype.itemsize
    frame = memoryview(arrays[index]).cast("B") if len(arrays[index]) else memoryview(b"")
    if len(frame) != num_bytes:
        raise _Malformed(f"{where} has shape {shape}, which is {num_bytes} bytes, got {len(frame)}")
    return np.frombuffer(frame.toreadonly(), dtype=dtype).reshape(shape)


def _count_arrays(body: Json) -> int:
    if isinstance(body, dict):
        return (
            1 if "array" in body and "dtype" in body else sum(_count_arrays(item) for item in body.values())
        )
    return sum(_count_arrays(item) for item in body) if isinstance(body, list) else 0
