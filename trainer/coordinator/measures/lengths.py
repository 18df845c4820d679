"""Buckets of response length, the same in every row, so that rows of a run can be compared."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from asyppo_async.algorithms.calibration import length_bucket

LENGTH_EDGES_TOKENS = (64, 512, 1_000, 8_000, 30_000)


def filled_buckets(lengths: Tensor) -> Iterator[tuple[int, str]]:
    """Index and name of the buckets that hold a response."""
    present = set(length_bucket(lengths, LENGTH_EDGES_TOKENS).tolist())
    for index, name in enumerate(_names(LENGTH_EDGES_TOKENS)):
        if index in present:
            yield index, name


def _names(edges: Sequence[int]) -> list[str]:
    return [*(f"to_{edge}_tokens" for edge in edges), f"beyond_{edges[-1]}_tokens"]
