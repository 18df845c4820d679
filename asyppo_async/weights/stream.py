"""Tensors as they arrive, for a receiver that loads each at once and keeps no copy of the whole."""

import time
from collections.abc import Iterator, Sequence

import torch

from asyppo_async.weights.buckets import Bucket
from asyppo_async.weights.group import Broadcast, WeightGroup
from asyppo_async.weights.manifest import Manifest
from asyppo_async.weights.transfer import NUM_BUFFERS, as_tensor


def receive_tensors(
    group: WeightGroup, manifest: Manifest, buckets: Sequence[Bucket], deadline_s: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor, in manifest order, each as soon as its last byte is there.

    Every tensor has memory of its own, which nobody writes to again: a loader may refer to it until its module is
    complete. Views would be cheaper, but one of them would hold its whole bucket. Two buckets are held, used in turns,
    and besides them what the loader still refers to: a module at most, or its last tensor and the one behind it.

    Raises:
        WeightSyncError: the sender is gone or the deadline has passed.
    """
    places = iter(zip(manifest.tensors, manifest.offsets, strict=True))
    place = next(places, None)
    tensor: torch.Tensor | None = None
    for bucket, data in _arriving(group, buckets, time.monotonic() + deadline_s):
        while place is not None:
            spec, start = place
            end = start + spec.num_bytes
            if spec.num_bytes and start >= bucket.end:
                break
            if tensor is None:
                tensor = torch.empty(spec.num_bytes, dtype=torch.uint8, device=data.device)
            begin, stop = max(start, bucket.start), min(end, bucket.end)
            if stop > begin:
                tensor[begin - start : stop - start] = data[begin - bucket.start : stop - bucket.start]
            if end > bucket.end:
                break
            yield spec.name, as_tensor(tensor, spec)
            tensor = None
            place = next(places, None)


def _arriving(
    group: WeightGroup, buckets: Sequence[Bucket], deadline_at_s: float
) -> Iterator[tuple[Bucket, torch.Tensor]]:
    """Each bucket's bytes, which are overwritten once the next one is asked for."""
    size = max((bucket.num_bytes for bucket in buckets), default=0)
    buffers = [torch.empty(size, dtype=torch.uint8, device=group.device) for _ in buckets[:NUM_BUFFERS]]
    under_way: list[tuple[Bucket, torch.Tensor, Broadcast]] = []
    for index, bucket in enumerate(buckets):
        data = buffers[index % NUM_BUFFERS][: bucket.num_bytes]
        what = f"receiving bucket {index + 1} of {len(buckets)} ({bucket.num_bytes} bytes)"
        under_way.append((bucket, data, group.begin_broadcast(data, what, deadline_at_s - time.monotonic())))
        if len(under_way) == NUM_BUFFERS:
            yield _arrived(under_way)
    while under_way:
        yield _arrived(under_way)


def _arrived(under_way: list[tuple[Bucket, torch.Tensor, Broadcast]]) -> tuple[Bucket, torch.Tensor]:
    bucket, data, broadcast = under_way.pop(0)
    broadcast.finish()
    return bucket, data
