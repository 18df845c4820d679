"""This server's end of a weight session: the process group, and the memory that the bytes arrive in.

The memory is an anonymous file (`memfd`): the engine's processes map it through /proc, so there is one copy for any
number of workers and no limit of /dev/shm. All waiting is done in threads, beside the event loop.
"""

import asyncio
import mmap
import os
import threading
from dataclasses import dataclass

import torch

from asyppo_async.errors import WeightSyncError
from asyppo_async.fleet.engine.protocol import StagedWeights
from asyppo_async.weights.buckets import Bucket, plan_buckets
from asyppo_async.weights.group import TransferBackend, WeightGroup
from asyppo_async.weights.manifest import Manifest
from asyppo_async.weights.transfer import ReceiveReport, receive_into


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where and as whom this server joins the process group."""

    backend: TransferBackend
    store_host: str
    store_port: int
    rank: int
    world_size: int
    epoch: int
    manifest: Manifest
    bucket_bytes: int
    deadline_s: float


class StagingArea:
    """One session's group and memory. Made by `join`, ended by `close`."""

    def __init__(self, group: WeightGroup, manifest: Manifest, buckets: tuple[Bucket, ...]) -> None:
        self._group = group
        self._manifest = manifest
        self._buckets = buckets
        self._file_descriptor = os.memfd_create("asyppo-staged-weights")
        os.ftruncate(self._file_descriptor, max(1, manifest.num_bytes))
        self._mapped = mmap.mmap(self._file_descriptor, max(1, manifest.num_bytes))
        self._buffer = torch.frombuffer(self._mapped, dtype=torch.uint8)[: manifest.num_bytes]
        self._checksums: tuple[int, ...] | None = None
        self._closed = threading.Lock()

    @classmethod
    async def join(cls, meeting: Meeting) -> "StagingArea":
        """Meet the other ranks.

        Raises:
            WeightSyncError: they did not meet within the deadline.
            ValueError: the buckets are too small to hold anything.
        """
        buckets = plan_buckets(meeting.manifest, meeting.bucket_bytes)
        abandoned = threading.Event()

        def meet() -> WeightGroup:
            group = WeightGroup.join(
                backend=meeting.backend,
                store=(meeting.store_host, meeting.store_port),
                rank=meeting.rank,
                world_size=meeting.world_size,
                epoch=meeting.epoch,
                deadline_s=meeting.deadline_s,
            )
            if abandoned.is_set():
                group.close()
            return group

        try:
            group = await asyncio.to_thread(meet)
        except asyncio.CancelledError:
            abandoned.set()  # the thread cannot be interrupted; it leaves the group as soon as it has met it
            raise
        return cls(group, meeting.manifest, buckets)

    async def receive(self, deadline_s: float) -> ReceiveReport:
        """Receive every bucket, in a thread.

        Raises:
            WeightSyncError: the sender is gone or late; the group is unusable from then on.
        """
        self._checksums = None
        report = await asyncio.to_thread(
            receive_into, self._group, self._manifest, self._buckets, self._buffer, deadline_s
        )
        self._checksums = report.checksums
        return report

    def staged(self, checksums: tuple[int, ...]) -> StagedWeights:
        """What was received, if it is what was sent.

        Raises:
            WeightSyncError: nothing complete is here, or a checksum differs; the message names the tensors.
        """
        if self._checksums is None:
            raise WeightSyncError("no complete version is staged")
        if len(checksums) != len(self._checksums):
            raise WeightSyncError(f"{len(checksums)} checksums for {len(self._checksums)} tensors")
        pairs = zip(self._manifest.tensors, self._checksums, checksums, strict=True)
        wrong = [spec.name for spec, received, sent in pairs if received != sent]
        if wrong:
            raise WeightSyncError(
                f"the bytes of {len(wrong)} tensors differ from those sent: {', '.join(wrong[:5])}"
            )
        return StagedWeights(
            process_id=os.getpid(),
            file_descriptor=self._file_descriptor,
            num_bytes=max(1, self._manifest.num_bytes),
            manifest=self._manifest,
            checksums=checksums,
        )

    def close(self) -> None:
        """Leave the group, which ends a receive that is under way; the memory goes when nobody refers to it."""
        if self._closed.acquire(blocking=False):
            self._group.close()
            os.close(self._file_descriptor)
