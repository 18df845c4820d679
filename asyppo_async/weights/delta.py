"""What changed between two versions of the same bfloat16 tensors: element by element, and bitwise exact.

A small learning rate changes few elements of a bfloat16 tensor a step, and those mostly to a neighbouring number. So a
delta lists the gaps between changed positions, and the steps between the bit patterns, both as LEB128 numbers (seven
bits a byte). float32 weights change nearly all at every step: a delta of them would be larger than they are.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from asyppo_async.errors import WeightSyncError
from asyppo_async.weights.checksum import checksum_of_bytes
from asyppo_async.weights.manifest import Manifest

Patterns = NDArray[np.uint16]
"""Bit patterns of bfloat16 numbers."""

_RECORD = struct.Struct("<IQQQ")
"""Index of the tensor, XXH3-64 of its bytes afterwards, bytes of gaps, bytes of steps."""
_BITS = 7
_LARGEST_VARINT_BYTES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDelta:
    index: int
    """Of the tensor in the manifest."""
    checksum: int
    """XXH3-64 of its bytes when the delta has been applied."""
    gaps: NDArray[np.uint8]
    steps: NDArray[np.uint8]

    def packed(self) -> bytes:
        header = _RECORD.pack(self.index, self.checksum, len(self.gaps), len(self.steps))
        return header + self.gaps.tobytes() + self.steps.tobytes()


def delta_of(index: int, before: Patterns, after: Patterns) -> TensorDelta | None:
    """The delta between two states of tensor `index`, [n] each; None where they are equal, bit for bit."""
    positions = np.flatnonzero(before != after)
    if not len(positions):
        return None
    gaps = np.diff(positions, prepend=-1) - 1
    # Modulo 2^16, so that the sum gives the pattern back whatever the two are (NaN and -0 included).
    steps = (after[positions] - before[positions]).view(np.int16).astype(np.int32)
    return TensorDelta(
        index=index,
        checksum=checksum_of_bytes(torch.from_numpy(np.ascontiguousarray(after).view(np.uint8))),
        gaps=_varints(gaps.astype(np.uint64)),
        steps=_varints(((steps << 1) ^ (steps >> 15)).astype(np.uint16).astype(np.uint64)),
    )


def apply_delta(manifest: Manifest, buffer: torch.Tensor, data: NDArray[np.uint8]) -> dict[int, int]:
    """Patch the tensors in `buffer` (uint8, [manifest.num_bytes]) in place.

    Returns:
        XXH3-64 of each changed tensor as it is now, by its index.

    Raises:
        WeightSyncError: the delta is no delta of this manifest, or a result is not what the sender has; the content of
            the buffer is undefined then.
    """
    offsets = manifest.offsets
    memory = buffer.numpy()
    checksums = {}
    for record in unpacked(data):
        if record.index >= len(offsets):
            raise WeightSyncError(f"a delta of tensor {record.index} of {len(offsets)}")
        spec, start = manifest.tensors[record.index], offsets[record.index]
        patched = memory[start : start + spec.num_bytes]
        _patch(patched.view(np.uint16), record, spec.name)
        checksum = checksum_of_bytes(torch.from_numpy(patched))
        if checksum != record.checksum:
            raise WeightSyncError(
                f"{spec.name} with the delta applied has checksum {checksum:#018x}, the sender's is "
                f"{record.checksum:#018x}: the copies before it differed"
            )
        checksums[record.index] = checksum
    return checksums


def unpacked(data: NDArray[np.uint8]) -> Iterator[TensorDelta]:
    """The records of a delta, one for each changed tensor."""
    start = 0
    while start < len(data):
        if len(data) - start < _RECORD.size:
            raise WeightSyncError("a delta ends in the middle of a record")
        index, checksum, num_gaps, num_steps = _RECORD.unpack(data[start : start + _RECORD.size].tobytes())
        start += _RECORD.size
        if len(data) - start < num_gaps + num_steps:
            raise WeightSyncError(f"a delta ends within tensor {index}")
        gaps, steps = data[start : start + num_gaps], data[start + num_gaps : start + num_gaps + num_steps]
        yield TensorDelta(index=index, checksum=checksum, gaps=gaps, steps=steps)
        start += num_gaps + num_steps


def _patch(patterns: Patterns, record: TensorDelta, name: str) -> None:
    gaps, coded = _numbers(record.gaps), _numbers(record.steps)
    positions = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if len(gaps) != len(coded) or (len(positions) and int(positions[-1]) >= len(patterns)):
        raise WeightSyncError(
            f"{name}: a delta of {len(gaps)} positions and {len(coded)} steps does not fit its {len(patterns)} elements"
        )
    steps = (coded.astype(np.int32) >> 1) ^ -(coded.astype(np.int32) & 1)
    patterns[positions] += steps.astype(np.int16).view(np.uint16)


def _varints(values: NDArray[np.uint64]) -> NDArray[np.uint8]:
    lengths = np.ones(len(values), dtype=np.int64)
    for size in range(1, _LARGEST_VARINT_BYTES):
        lengths += values >= np.uint64(1 << (_BITS * size))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    coded = np.empty(int(ends[-1]), dtype=np.uint8)
    for place in range(int(lengths.max())):
        chosen = lengths > place
        low = (values[chosen] >> np.uint64(_BITS * place)) & np.uint64(127)
        more = (lengths[chosen] > place + 1).astype(np.uint64) << np.uint64(_BITS)
        coded[starts[chosen] + place] = (low | more).astype(np.uint8)
    return coded


def _numbers(coded: NDArray[np.uint8]) -> NDArray[np.uint64]:
    ends = np.flatnonzero(coded < 1 << _BITS)
    starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)[: len(ends)]
    lengths = ends - starts + 1
    if len(coded) != (int(ends[-1]) + 1 if len(ends) else 0) or (lengths > _LARGEST_VARINT_BYTES).any():
        raise WeightSyncError("a delta holds a number without an end")
    values = np.zeros(len(ends), dtype=np.uint64)
    for place in range(int(lengths.max(initial=0))):
        chosen = lengths > place
        values[chosen] |= (coded[starts[chosen] + place].astype(np.uint64) & np.uint64(127)) << np.uint64(
            _BITS * place
        )
    return values
