"""Where a vLLM worker's new weights come from: bytes that the server process staged, or the sender itself."""

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from asyppo_async.errors import WeightSyncError
from asyppo_async.weights.buckets import plan_buckets
from asyppo_async.weights.checksum import checksum_of
from asyppo_async.weights.group import TransferBackend, WeightGroup
from asyppo_async.weights.manifest import Dtype, Manifest, TensorSpec
from asyppo_async.weights.stream import receive_tensors
from asyppo_async.weights.transfer import tensors_in


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedSource:
    """Where the staged bytes are, and what they should be. Lists are in the order of the byte space."""

    process_id: int
    file_descriptor: int
    num_bytes: int
    names: list[str]
    shapes: list[list[int]]
    dtypes: list[str]
    checksums: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectSource:
    """The process group, and what travels over it. Lists are in the order of the wire."""

    backend: TransferBackend
    store_host: str
    store_port: int
    first_rank: int
    world_size: int
    epoch: int
    names: list[str]
    shapes: list[list[int]]
    dtypes: list[str]
    bucket_bytes: int
    deadline_s: float


class StagedTensors:
    """A read-only view of the staged bytes (private mapping: a write would never reach the other processes)."""

    def __init__(self, source: StagedSource) -> None:
        path = f"/proc/{source.process_id}/fd/{source.file_descriptor}"
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                mapped = mmap.mmap(
                    descriptor,
                    source.num_bytes,
                    flags=mmap.MAP_PRIVATE,
                    prot=mmap.PROT_READ | mmap.PROT_WRITE,
                )
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise WeightSyncError(f"the staged weights at {path} cannot be mapped: {error}") from error
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        self._manifest = _manifest(source.names, source.shapes, source.dtypes)
        self._checksums = source.checksums

    def tensors(self, names: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of these names, in the order of the byte space."""
        return (pair for pair in tensors_in(self._manifest, self._bytes) if pair[0] in names)

    def verify(self) -> None:
        """Raise `WeightSyncError` where the bytes here are not those that were sent."""
        named = tensors_in(self._manifest, self._bytes)
        _compare(self._manifest, [checksum_of(tensor) for _, tensor in named], self._checksums)

    def check_unreferenced(self, model: torch.nn.Module) -> None:
        """The next version arrives in the same bytes, so no served weight may live in them."""
        start = self._bytes.data_ptr()
        end = start + self._bytes.numel()
        for name, parameter in model.named_parameters():
            if start <= parameter.data_ptr() < end:
                raise WeightSyncError(f"{name} still refers to the staged bytes after the load")


class DirectTensors:
    """This worker's place in the sender's process group."""

    def __init__(self, source: DirectSource, worker: int) -> None:
        """Meet the other ranks; `worker` counts this server's workers, over its data-parallel replicas."""
        self._manifest = _manifest(source.names, source.shapes, source.dtypes)
        self._buckets = plan_buckets(self._manifest, source.bucket_bytes)
        self._checksums: list[int] = []
        self._group = WeightGroup.join(
            backend=source.backend,
            store=(source.store_host, source.store_port),
            rank=source.first_rank + worker,
            world_size=source.world_size,
            epoch=source.epoch,
            deadline_s=source.deadline_s,
        )

    def receive(self, deadline_s: float) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor as it arrives, hashed as it is handed to the loader."""
        self._checksums = []
        for name, tensor in receive_tensors(self._group, self._manifest, self._buckets, deadline_s):
            self._checksums.append(checksum_of(tensor))
            yield name, tensor

    def compare(self, checksums: Sequence[int]) -> None:
        """Raise `WeightSyncError` where something else was loaded than was sent."""
        _compare(self._manifest, self._checksums, checksums)

    def close(self) -> None:
        self._group.close()


def _compare(manifest: Manifest, found: Sequence[int], sent: Sequence[int]) -> None:
    if len(found) != len(sent):
        raise WeightSyncError(f"{len(found)} tensors are here, {len(sent)} were sent")
    for spec, ours, theirs in zip(manifest.tensors, found, sent, strict=True):
        if ours != theirs:
            raise WeightSyncError(f"checksum of {spec.name}: {ours:#018x} here, {theirs:#018x} sent")


def _manifest(names: Sequence[str], shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> Manifest:
    return Manifest(
        tensors=tuple(
            TensorSpec(name=name, shape=tuple(shape), dtype=cast(Dtype, dtype))
            for name, shape, dtype in zip(names, shapes, dtypes, strict=True)
        )
    )
