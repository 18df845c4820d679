"""How bytes arrive in host memory: over the process group of a session, or from a folder. All waiting is in threads."""

import asyncio
import threading
import time
from dataclasses import dataclass
from typing import Protocol

from asyppo_async.errors import WeightSyncError
from asyppo_async.fleet.host_memory import HostMemory
from asyppo_async.fleet.update_state import RunIdentity
from asyppo_async.rpc.calls import Way
from asyppo_async.weights.buckets import plan_buckets
from asyppo_async.weights.delta_wire import receive_delta
from asyppo_async.weights.group import TransferBackend, WeightGroup
from asyppo_async.weights.manifest import Manifest
from asyppo_async.weights.shards import read_version, run_folder
from asyppo_async.weights.transfer import ReceiveReport, receive_into


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the bytes come from: where and as whom this server joins the process group, or the folder."""

    way: Way
    backend: TransferBackend
    store_host: str
    store_port: int
    rank: int
    world_size: int
    epoch: int
    manifest: Manifest
    bucket_bytes: int
    deadline_s: float
    folder: str


class Arrival(Protocol):
    async def receive(
        self, memory: HostMemory, version: int, base_version: int, deadline_s: float
    ) -> ReceiveReport:
        """Bring one version into the memory.

        Raises:
            WeightSyncError: the sender, or what it wrote, is gone or late; the session is of no more use.
        """
        ...

    def close(self) -> None:
        """End what is under way, as far as that is possible. Closing twice does nothing."""
        ...


class GroupArrival:
    """Over a process group, of which this server is one rank. Made by `join`."""

    def __init__(self, group: WeightGroup, identity: RunIdentity, meeting: Meeting) -> None:
        self._group = group
        self._identity = identity
        self._bucket_bytes = meeting.bucket_bytes
        self._buckets = plan_buckets(meeting.manifest, meeting.bucket_bytes)

    @classmethod
    async def join(cls, identity: RunIdentity, meeting: Meeting) -> "GroupArrival":
        """Meet the other ranks.

        Raises:
            WeightSyncError: they did not meet within the deadline.
            ValueError: the buckets are too small to hold anything.
        """
        plan_buckets(meeting.manifest, meeting.bucket_bytes)  # before anybody waits
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
        return cls(group, identity, meeting)

    async def receive(
        self, memory: HostMemory, version: int, base_version: int, deadline_s: float
    ) -> ReceiveReport:
        return await asyncio.to_thread(self._receive, memory, version, base_version, deadline_s)

    def close(self) -> None:
        self._group.close()

    def _receive(
        self, memory: HostMemory, version: int, base_version: int, deadline_s: float
    ) -> ReceiveReport:
        started_s = time.monotonic()
        with memory.written_by(self._identity) as copy:
            if base_version >= 0:
                if copy.version != base_version:
                    raise WeightSyncError(
                        f"a delta against version {base_version} is coming, and version {copy.version} is here"
                    )
                delta = receive_delta(self._group, self._bucket_bytes, deadline_s)
                if delta is not None:
                    wire_s = time.monotonic() - started_s
                    memory.changed(copy.patch(version, delta))
                    return ReceiveReport(checksums=copy.checksums, num_bytes=len(delta), wire_s=wire_s)
            copy.invalidate()
            memory.unloaded()
            left_s = deadline_s - (time.monotonic() - started_s)
            report = receive_into(self._group, copy.manifest, self._buckets, copy.buffer, left_s)
            copy.complete(version, report.checksums)
            return report


class FolderArrival:
    """From files that the trainer has written."""

    def __init__(self, identity: RunIdentity, folder: str) -> None:
        self._identity = identity
        self._folder = run_folder(folder, identity.run_id, identity.incarnation)

    async def receive(
        self, memory: HostMemory, version: int, base_version: int, deadline_s: float
    ) -> ReceiveReport:
        try:
            async with asyncio.timeout(deadline_s):
                return await asyncio.to_thread(self._read, memory, version)
        except TimeoutError as error:
            raise WeightSyncError(
                f"version {version} was not read from {self._folder} within {deadline_s:g} s"
            ) from error

    def close(self) -> None:
        pass

    def _read(self, memory: HostMemory, version: int) -> ReceiveReport:
        started_s = time.monotonic()
        with memory.written_by(self._identity) as copy:
            index, changed = read_version(self._folder, version, copy)
            memory.changed(changed)
            return ReceiveReport(
                checksums=copy.checksums, num_bytes=index.num_bytes, wire_s=time.monotonic() - started_s
            )


async def open_arrival(identity: RunIdentity, meeting: Meeting) -> Arrival:
    """As the session's way says; errors as `GroupArrival.join`."""
    if meeting.way == "folder":
        return FolderArrival(identity, meeting.folder)
    return await GroupArrival.join(identity, meeting)
