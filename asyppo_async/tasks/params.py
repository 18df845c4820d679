"""Reading a task's params, with errors that name the key and the value got."""

import difflib
from collections.abc import Iterable

from asyppo_async.errors import TaskError
from asyppo_async.tasks.protocol import TaskSpec


def nearest(word: str, words: Iterable[str]) -> str:
    """A clause that names the nearest words, or all of them where none is near and they are few."""
    candidates = sorted(words)
    near = difflib.get_close_matches(word, candidates, n=3, cutoff=0.5)
    if near:
        return "did you mean " + " or ".join(near) + "?"
    return "known: " + ", ".join(candidates) if len(candidates) <= 20 else "nothing known is near it"


def refuse_unknown(spec: TaskSpec, *, known: Iterable[str]) -> None:
    """
    Raises:
        TaskError: `spec` has a param that is not in `known`; the message names the nearest one.
    """
    names = sorted(known)
    for key in spec.params:
        if key not in names:
            raise TaskError(f"task {spec.name} has no param {key!r}; {nearest(key, names)}")


def read_int(spec: TaskSpec, key: str, *, absent: int, at_least: int, at_most: int) -> int:
    """An int of the params, `absent` where it is not given.

    Raises:
        TaskError: it is no int, or out of range.
    """
    value = spec.params.get(key, absent)
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
        raise TaskError(
            f"task {spec.name}: param {key} must be an int from {at_least} to {at_most}, got {value!r}"
        )
    return value
