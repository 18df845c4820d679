"""All tensors of a manifest through a weight group, bucket by bucket, with a checksum of every tensor at both ends."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from asyppo_async.errors import WeightSyncError
from asyppo_async.weights.buckets import Bucket
from asyppo_async.weights.checksum import RunningChecksum, checksum_of_bytes
from asyppo_async.weights.group import Broadcast, WeightGroup
from asyppo_async.weights.manifest import Dtype, Manifest, TensorSpec

__all__ = [
    "ReceiveReport",
    "SendReport",
    "WeightGroup",
    "as_tensor",
    "bytes_of",
    "checksums_of",
    "matched",
    "receive_into",
    "send_tensors",
    "tensors_in",
]

_TORCH_DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NUM_BUFFERS = 2
"""Buckets that are held at a time: one is filled or read while the other is on the wire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReport:
    checksums: tuple[int, ...]
    """XXH3-64 of each tensor's bytes, in manifest order."""
    num_bytes: int
    gather_s: float
    """Getting, casting, hashing and copying the tensors; partly beside the wire."""
    wire_s: float
    """Waiting for the wire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveReport:
    checksums: tuple[int, ...]
    num_bytes: int
    wire_s: float
    """From the first wait to the last bucket; hashing is beside it."""


def send_tensors(
    group: WeightGroup,
    manifest: Manifest,
    buckets: tuple[Bucket, ...],
    tensors: Iterable[tuple[str, torch.Tensor]],
    deadline_s: float,
) -> SendReport:
    """Send all tensors from rank 0; at most two buckets are held beside them.

    A large tensor is sent from where it is, and not touched by anybody until it has left.

    Args:
        group: Whose rank 0 this is.
        manifest: What the receivers expect.
        buckets: `plan_buckets` of the same manifest at both ends.
        tensors: Name and full tensor, in manifest order, finished: where a tensor has to be gathered, every rank
            completes the gather before this one goes on, since a gather inside a broadcast enqueues the two in
            different orders on different ranks.
        deadline_s: For all of it.

    Raises:
        WeightSyncError: the tensors are not those of the manifest, a receiver is gone, or the deadline has passed.
    """
    sender = _Sender(group, buckets, time.monotonic() + deadline_s)
    checksums = []
    started_s = time.monotonic()
    for spec, offset, tensor in matched(manifest, tensors):
        data = bytes_of(tensor, spec)
        checksums.append(checksum_of_bytes(data))
        sender.write(offset, data)
    sender.finish()
    total_s = time.monotonic() - started_s
    return SendReport(
        checksums=tuple(checksums),
        num_bytes=manifest.num_bytes,
        gather_s=total_s - sender.wire_s,
        wire_s=sender.wire_s,
    )


def receive_into(
    group: WeightGroup,
    manifest: Manifest,
    buckets: tuple[Bucket, ...],
    buffer: torch.Tensor,
    deadline_s: float,
) -> ReceiveReport:
    """Receive all tensors into their places in `buffer` (uint8, [manifest.num_bytes], host memory).

    No part of the buffer is used twice, so references into it stay right until the next publication.

    Raises:
        WeightSyncError: the sender is gone or the deadline has passed; the content of the buffer is undefined then.
    """
    if buffer.dtype != torch.uint8 or buffer.shape != (manifest.num_bytes,):
        raise ValueError(
            f"the buffer must be uint8 [{manifest.num_bytes}], got {buffer.dtype} {list(buffer.shape)}"
        )
    started_s = time.monotonic()
    deadline_at_s = started_s + deadline_s
    checksums = _RunningChecksums(manifest, buffer)
    pending: list[Broadcast] = []
    for index, bucket in enumerate(buckets):
        what = f"receiving bucket {index + 1} of {len(buckets)} ({bucket.num_bytes} bytes)"
        left_s = deadline_at_s - time.monotonic()
        pending.append(group.begin_broadcast(buffer[bucket.start : bucket.end], what, left_s))
        if len(pending) == NUM_BUFFERS:
            pending.pop(0).finish()
            checksums.advance_to(buckets[index - 1].end)
    for broadcast in pending:
        broadcast.finish()
    wire_s = time.monotonic() - started_s
    checksums.advance_to(manifest.num_bytes)
    return ReceiveReport(checksums=checksums.values(), num_bytes=manifest.num_bytes, wire_s=wire_s)


def tensors_in(manifest: Manifest, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of the tensors in a received buffer, in manifest order; no copy."""
    for spec, offset in zip(manifest.tensors, manifest.offsets, strict=True):
        yield spec.name, as_tensor(buffer[offset : offset + spec.num_bytes], spec)


def as_tensor(data: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The tensor whose bytes `data` (uint8, [spec.num_bytes]) holds; no copy."""
    return data.view(_TORCH_DTYPES[spec.dtype]).view(spec.shape)


def checksums_of(manifest: Manifest, buffer: torch.Tensor) -> tuple[int, ...]:
    """XXH3-64 of each tensor in `buffer`, as it is now."""
    checksums = _RunningChecksums(manifest, buffer)
    checksums.advance_to(manifest.num_bytes)
    return checksums.values()


def matched(
    manifest: Manifest, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[TensorSpec, int, torch.Tensor]]:
    """Each tensor with its place in the byte space; raises `WeightSyncError` where one is not what comes next."""
    given = iter(tensors)
    for spec, offset in zip(manifest.tensors, manifest.offsets, strict=True):
        name, tensor = next(given, (None, None))
        if tensor is None or name != spec.name or tuple(tensor.shape) != spec.shape:
            got = "nothing" if tensor is None else f"{name} {list(tensor.shape)}"
            raise WeightSyncError(f"the manifest has {spec.name} {list(spec.shape)} next, got {got}")
        yield spec, offset, tensor
    extra, _ = next(given, (None, None))
    if extra is not None:
        raise WeightSyncError(f"{extra} comes after the last tensor of the manifest")


def bytes_of(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The tensor's bytes in host memory as they are sent, uint8 [num_bytes]."""
    cast = tensor.detach().to(device="cpu", dtype=_TORCH_DTYPES[spec.dtype]).contiguous()
    return cast.reshape(-1).view(torch.uint8)


class _Sender:
    """Two slots: one is filled while the other is on the wire. Each has a buffer, or refers to a tensor's own bytes."""

    def __init__(self, group: WeightGroup, buckets: tuple[Bucket, ...], deadline_at_s: float) -> None:
        self._group = group
        self._buckets = buckets
        self._deadline_at_s = deadline_at_s
        self._size = max((bucket.num_bytes for bucket in buckets), default=0)
        self._buffers: list[torch.Tensor | None] = [None] * NUM_BUFFERS
        self._on_wire: list[Broadcast | None] = [None] * NUM_BUFFERS
        self._index = 0
        self.wire_s = 0.0

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Copy `data` to its place in the byte space and send every bucket that is behind it."""
        whole, end = len(data), offset + len(data)
        while offset < end:
            bucket = self._buckets[self._index]
            if offset >= bucket.end:
                self._send(self._buffer())
                continue
            num_bytes = min(end, bucket.end) - offset
            if num_bytes == bucket.num_bytes:
                self._buffers[self._index % NUM_BUFFERS] = None
                self._send(data[:num_bytes])
            else:
                start = offset - bucket.start
                self._buffer()[start : start + num_bytes] = data[:num_bytes]
            data = data[num_bytes:]
            offset += num_bytes
        if whole > self._size:  # its pieces on the wire would hold all of it beside the next tensor
            self._wait_for_all()

    def finish(self) -> None:
        while self._index < len(self._buckets):
            self._send(self._buffer())
        self._wait_for_all()

    def _buffer(self) -> torch.Tensor:
        slot = self._index % NUM_BUFFERS
        buffer = self._buffers[slot]
        if buffer is None:
            buffer = self._buffers[slot] = torch.zeros(self._size, dtype=torch.uint8)
        return buffer

    def _send(self, source: torch.Tensor) -> None:
        bucket = self._buckets[self._index]
        slot = self._index % NUM_BUFFERS
        what = f"sending bucket {self._index + 1} of {len(self._buckets)} ({bucket.num_bytes} bytes)"
        left_s = self._deadline_at_s - time.monotonic()
        self._on_wire[slot] = self._group.begin_broadcast(source[: bucket.num_bytes], what, left_s)
        self._index += 1
        self._wait_for(self._index % NUM_BUFFERS)

    def _wait_for_all(self) -> None:
        for slot in range(NUM_BUFFERS):
            self._wait_for(slot)

    def _wait_for(self, slot: int) -> None:
        broadcast, self._on_wire[slot] = self._on_wire[slot], None
        if broadcast is not None:
            started_s = time.monotonic()
            broadcast.finish()
            self.wire_s += time.monotonic() - started_s


class _RunningChecksums:
    """XXH3-64 of each tensor, advanced as far as the buffer is filled."""

    def __init__(self, manifest: Manifest, buffer: torch.Tensor) -> None:
        self._manifest = manifest
        self._offsets = manifest.offsets
        self._bytes = buffer
        self._done = 0
        self._values: list[int] = []
        self._current = RunningChecksum()

    def advance_to(self, end: int) -> None:
        while len(self._values) < len(self._offsets):
            start = self._offsets[len(self._values)]
            tensor_end = start + self._manifest.tensors[len(self._values)].num_bytes
            self._done = max(self._done, start)
            stop = min(tensor_end, end)
            if stop > self._done:
                self._current.add(self._bytes[self._done : stop])
                self._done = stop
            if end < tensor_end:
                return
            self._values.append(self._current.value())
            self._current = RunningChecksum()

    def values(self) -> tuple[int, ...]:
        return tuple(self._values)
