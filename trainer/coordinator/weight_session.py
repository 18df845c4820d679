"""The process group between actor rank 0 and the servers that take part in publications."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from itertools import accumulate
from typing import Literal, Protocol

from asyppo_async.config.sections import WeightsSection
from asyppo_async.errors import AsyppoError, FleetError, WeightSyncError, WorkerError
from asyppo_async.rpc.calls import SessionPlace, StageReport
from asyppo_async.rpc.member import Member
from asyppo_async.trainer.coordinator.membership import RunIdentity
from asyppo_async.trainer.coordinator.parties import all_parties, party_and_others
from asyppo_async.trainer.worker.messages import ActorForward, ActorForwardResult
from asyppo_async.trainer.worker.session_messages import SendResult, SessionStore
from asyppo_async.weights.manifest import Manifest
from asyppo_async.weights.shards import run_folder

_log = logging.getLogger(__name__)

CLOSE_DEADLINE_S = 5.0
"""For each party of a session that is being left."""


class WeightSender(Protocol):
    """The actor group, as a publication sees it."""

    async def manifest(self) -> Manifest: ...

    async def open_session(
        self, *, host: str, epoch: int, world_size: int, backend: Literal["gloo", "nccl"], deadline_s: float
    ) -> SessionStore:
        """Start the store at rank 0; the others are told where it listens."""
        ...

    async def join_session(self, *, epoch: int, deadline_s: float) -> None:
        """Returns when all ranks of the session have met."""
        ...

    def on_device(self) -> AbstractAsyncContextManager[None]:
        """Within, what is asked waits for no other group."""
        ...

    async def send_weights(
        self,
        version: int,
        deadline_s: float,
        *,
        base_version: int = -1,
        keep: bool = False,
        folder: str = "",
    ) -> SendResult:
        """Send everything, or what has changed since `base_version`; into `folder`, if one is named."""
        ...

    async def forward(self, request: ActorForward) -> ActorForwardResult: ...

    async def close_session(self) -> None: ...


class WeightSession:
    """The process group between the actor and those servers that take part, met anew under every new epoch."""

    def __init__(
        self, sender: WeightSender, run: RunIdentity, settings: WeightsSection, manifest: Manifest, host: str
    ) -> None:
        self._sender = sender
        self._run = run
        self._settings = settings
        self._manifest = manifest
        self._host = host
        self.members: tuple[Member, ...] = ()
        self.epoch = 0
        """Of the meeting; 0 before the first."""
        self._held_version = -1
        """What all members hold in host memory; -1: not all of them the same, or nothing."""

    async def meet(self, members: Sequence[Member], epoch: int) -> None:
        """Make the session that of these members under this epoch; nothing happens where it is so already.

        Raises:
            WeightSyncError: a server has other tensors, or did not join in time.
        """
        if epoch == self.epoch:
            return
        leaving = [member for member in self.members if member not in members]
        epoch_before = self.epoch
        self.epoch = epoch
        self.members = tuple(members)
        self._held_version = -1
        with phase("open", None):
            await _close_at(leaving, epoch_before)
            held = await (self._open() if self._settings.way == "folder" else self._join())
        if self._settings.way != "direct" and len(set(held)) == 1:
            self._held_version = held[0]

    async def deliver(
        self, version: int, deadline_s: float, *, complete: bool
    ) -> tuple[SendResult, list[StageReport]]:
        """All bytes to all members, or what has changed since the version that they hold.

        Args:
            version: Of the weights as they are.
            deadline_s: For all of it.
            complete: No delta, whatever they hold.

        Raises:
            AsyppoError: the session is of no more use.
        """
        settings = self._settings
        base_version = -1 if complete or settings.encoding == "full" else self._held_version
        self._held_version = -1
        sending = self._sender.send_weights(
            version,
            deadline_s,
            base_version=base_version,
            keep=settings.encoding == "delta",
            folder=self._run_folder() if settings.folder else "",
        )
        staging = [
            member.client.weights.stage(
                self.epoch,
                version,
                deadline_s,
                base_version=base_version,
                kv_on_update=settings.kv_on_update,
            )
            for member in self.members
        ]
        if settings.way == "folder":
            try:
                sent = await sending
            except AsyppoError:
                for each in staging:
                    each.close()
                raise
            staged = await all_parties(staging)
        else:
            sent, staged = await party_and_others(sending, staging)
        if settings.way != "direct":
            self._held_version = version
        return sent, staged

    async def leave(self) -> None:
        """Close both ends, as far as they still answer."""
        await _close_at(self.members, self.epoch)
        await _closed_or_warned(self._sender.close_session())
        self.members = ()

    def _run_folder(self) -> str:
        return run_folder(self._settings.folder, self._run.run_id, self._run.incarnation)

    async def _open(self) -> list[int]:
        """Without a process group."""
        nowhere = SessionStore(host="", port=0)
        return await all_parties([self._opened(member, 0, 0, nowhere) for member in self.members])

    async def _join(self) -> list[int]:
        deadline_s = self._settings.min_deadline_s
        sizes = [member.info.num_workers if self._settings.way == "direct" else 1 for member in self.members]
        first_ranks = list(accumulate(sizes, initial=1))
        world_size = first_ranks.pop()
        store = await self._sender.open_session(
            host=self._host,
            epoch=self.epoch,
            world_size=world_size,
            backend=self._settings.backend,
            deadline_s=deadline_s,
        )
        _, held = await party_and_others(
            self._sender.join_session(epoch=self.epoch, deadline_s=deadline_s),
            [
                self._opened(member, rank, world_size, store)
                for rank, member in zip(first_ranks, self.members, strict=True)
            ],
        )
        return held

    def _opened(
        self, member: Member, rank: int, world_size: int, store: SessionStore
    ) -> Coroutine[object, object, int]:
        place = self._place(rank, world_size, store)
        return member.client.weights.open_session(place, self._manifest, self._settings.min_deadline_s)

    def _place(self, rank: int, world_size: int, store: SessionStore) -> SessionPlace:
        return SessionPlace(
            run_id=self._run.run_id,
            incarnation=self._run.incarnation,
            epoch=self.epoch,
            rank=rank,
            world_size=world_size,
            backend=self._settings.backend,
            store_host=store.host,
            store_port=store.port,
            bucket_bytes=self._settings.bucket_bytes,
            lease_s=self._settings.lease_s,
            way=self._settings.way,
            folder=self._settings.folder,
        )


@asynccontextmanager
async def weight_session(
    sender: WeightSender, run: RunIdentity, settings: WeightsSection, manifest: Manifest, host: str
) -> AsyncIterator[WeightSession]:
    """A session that is closed at both ends when the block is left; nobody has met yet."""
    session = WeightSession(sender, run, settings, manifest, host)
    try:
        yield session
    finally:
        await session.leave()


@contextmanager
def phase(name: str, version: int | None) -> Iterator[None]:
    """Say in the error what was being done, once: the innermost phase counts."""
    try:
        yield
    except _PhaseFailed:
        raise
    except (FleetError, WorkerError, WeightSyncError) as error:
        what = "weight session" if version is None else f"publication of version {version}"
        failed = _PhaseFailed(f"{what}: phase {name}: {error}")
        failed.server = error.server
        raise failed from error


class _PhaseFailed(WeightSyncError):
    """An error that says already in which phase."""


async def _close_at(members: Sequence[Member], epoch: int) -> None:
    for member in members:
        await _closed_or_warned(member.client.weights.close_session(epoch, CLOSE_DEADLINE_S))


async def _closed_or_warned(closing: Coroutine[object, object, None]) -> None:
    try:
        async with asyncio.timeout(CLOSE_DEADLINE_S):
            await closing
    except (AsyppoError, TimeoutError) as error:
        _log.warning("the weight session was not closed cleanly: %s", error)
