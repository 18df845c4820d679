"""Cutting the byte space of a manifest into buckets of bounded size, the same way at both ends."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from asyppo_async.weights.manifest import ALIGNMENT_BYTES, Manifest, leaf_module

ALONE_BYTES = 2 * 2**20
"""A tensor of this size travels by itself, from where it is: a copy into a bucket would cost more than a collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """The bytes `[start, end)` of the byte space; one collective carries it."""

    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


def plan_buckets(manifest: Manifest, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Contiguous buckets that cover the byte space, none larger than `bucket_bytes`.

    A large tensor has buckets of its own. Among small ones a cut falls between two leaf modules of the engine where it
    can, else between two tensors, else inside a tensor that is larger than a bucket.
    """
    if bucket_bytes < ALIGNMENT_BYTES:
        raise ValueError(f"a bucket holds at least {ALIGNMENT_BYTES} bytes, got {bucket_bytes}")
    cutter = _Cutter(bucket_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
    for module_start, module_ends in _modules(manifest):
        sizes = [end - start for start, end in pairwise((module_start, *module_ends))]
        if max(sizes) < ALONE_BYTES and cutter.takes(module_ends[-1]):
            continue
        for size, tensor_end in zip(sizes, module_ends, strict=True):
            if size >= ALONE_BYTES:
                cutter.cut_out(tensor_end)
            elif not cutter.takes(tensor_end):
                cutter.cut_through(tensor_end)
    return cutter.finish()


class _Cutter:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buckets: list[Bucket] = []
        self._start = 0
        self._reached = 0

    def takes(self, end: int) -> bool:
        """Take everything up to `end` in one piece, in a new bucket if it does not fit behind what is there."""
        if end - self._start > self._limit:
            self._close(self._reached)
        if end - self._start > self._limit:
            return False
        self._reached = end
        return True

    def cut_through(self, end: int) -> None:
        while end - self._start > self._limit:
            self._close(self._start + self._limit)
        self._reached = end

    def cut_out(self, end: int) -> None:
        """Everything up to `end` in buckets that hold nothing else."""
        self._close(self._reached)
        self.cut_through(end)
        self._close(end)

    def finish(self) -> tuple[Bucket, ...]:
        self._close(self._reached)
        return tuple(self._buckets)

    def _close(self, end: int) -> None:
        if end > self._start:
            self._buckets.append(Bucket(start=self._start, end=end))
        self._start = self._reached = end


def _modules(manifest: Manifest) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Start of each leaf module, and the ends of its tensors; the padding behind a tensor belongs to it."""
    ends = [*manifest.offsets, manifest.num_bytes][1:]
    current: list[int] = []
    module, start = "", 0
    for spec, end in zip(manifest.tensors, ends, strict=True):
        if current and leaf_module(spec.name) != module:
            yield start, tuple(current)
            current, start = [], current[-1]
        module = leaf_module(spec.name)
        current.append(end)
    if current:
        yield start, tuple(current)
