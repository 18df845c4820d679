"""Weight updates: the sessions of a server, and the calls of each in their order."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import TypeVar

from asyppo_async.errors import WeightSyncError
from asyppo_async.fleet.call_error import CallError
from asyppo_async.fleet.engine.protocol import DirectPlace, KvOnUpdate, WeightsLabel
from asyppo_async.fleet.host_memory import HostMemory
from asyppo_async.fleet.loading import CommitTimes, DirectUpdate, Quiet, StagedUpdate, Update
from asyppo_async.fleet.prober import ProbeOutcome, Prober, ProbeWork
from asyppo_async.fleet.rollouts import RolloutFloor
from asyppo_async.fleet.staging import Meeting, open_arrival
from asyppo_async.fleet.update_state import Phase, RunIdentity, Session, UpdateState
from asyppo_async.weights.adapter import adapter_differences, wrong_kind
from asyppo_async.weights.manifest import Manifest
from asyppo_async.weights.transfer import ReceiveReport

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_MAX_LISTED = 20
_WAIT_FOR_LOAD_SHARE = 0.5
"""Of the time in which a session has to be opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedChecksums:
    """Of the publication that loaded what the engine holds."""

    identity: RunIdentity
    version: int
    names: tuple[str, ...]
    checksums: tuple[int, ...]


class Receiver:
    """`tasks` runs loads to their end even if their caller goes away."""

    def __init__(
        self,
        *,
        floor: RolloutFloor,
        manifest: Manifest,
        num_probe_slots: int,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._floor = floor
        self._state: UpdateState = floor.state
        self._quiet = Quiet(floor)
        self._manifest = manifest
        self._prober = Prober(floor.engine, num_probe_slots)
        self._tasks = tasks
        self._update: Update | None = None
        self._memory: HostMemory | None = None
        self._names: tuple[str, ...] = ()
        """Of the session's manifest."""
        self.loaded: LoadedChecksums | None = None
        self._num_calls = 0
        self._changed = asyncio.Event()

    async def open_session(self, session: Session, meeting: Meeting) -> int:
        """Check the manifest both ways, end any older session, meet the others.

        Returns:
            The version of this run that a delta may be against; -1: none.
        """
        self._check_manifest(meeting.manifest)
        await self._wait_until_loaded(meeting.deadline_s)
        phase = self._state.phase
        if self._state.open(session, time.monotonic()):
            self._quiet.lose_weights("a new session began before the verdict on the last version")
        await self._end_update(phase)
        with self._heard_during(session.epoch):
            try:
                update = await self._meet(session.identity, meeting)
            except (ValueError, WeightSyncError, asyncio.CancelledError) as error:
                if self._state.session is session:
                    self._state.fail_stage()
                if isinstance(error, ValueError):
                    raise CallError("INVALID_ARGUMENT", str(error)) from error
                raise
        if self._state.session is not session:  # a newer one began while this one waited for its ranks
            await update.close()
            raise CallError("ABORTED", f"epoch {session.epoch} was replaced by a newer session")
        self._update = update
        self._names = tuple(spec.name for spec in meeting.manifest.tensors)
        return self._memory.held_version(session.identity) if self._memory is not None else -1

    async def stage(
        self, epoch: int, version: int, base_version: int, deadline_s: float, kv_on_update: KvOnUpdate
    ) -> ReceiveReport:
        """Receive one version: beside the generation, or into the engine, as the session's way is."""
        with self._heard_during(epoch):
            update = self._opened_update()
            staging = update.stage(epoch, version, base_version, deadline_s, kv_on_update)
            if not update.touches_engine:
                return await staging
            try:
                return await self._to_the_end(staging)
            finally:
                if self._state.phase is Phase.CLOSED and self._update is update:
                    # So that the other ranks notice at once; beside the answer, which has the cause.
                    self._tasks.create_task(self._end_update(Phase.CLOSED))

    async def commit(
        self, epoch: int, version: int, checksums: tuple[int, ...], kv_on_update: KvOnUpdate
    ) -> CommitTimes:
        """Load what is staged, or finish what was loaded, and go on, on probation."""
        with self._heard_during(epoch):
            session = self._state.check_epoch(epoch)
            committing = self._opened_update().commit(epoch, version, checksums, kv_on_update)
            times = await self._to_the_end(committing)
            self.loaded = LoadedChecksums(
                identity=session.identity, version=version, names=self._names, checksums=checksums
            )
            return times

    async def probe(self, epoch: int, version: int, work: ProbeWork) -> ProbeOutcome:
        """Score and sample with the weights on probation; see `Prober`."""
        with self._heard_during(epoch):
            candidate = self._state.check_probe(epoch, version)
            return await self._prober.run(work, candidate.load, self._state.salt)

    def judge(self, epoch: int, version: int, passed: bool) -> None:
        """Release what was withheld, or throw it away."""
        with self._heard_during(epoch):
            self._state.judge(epoch, version, passed)
            served = self._state.served
            if served is None:
                self._quiet.lose_weights(f"version {version} failed its probe")
            else:
                self._floor.gate.release(served.load)
                self._floor.queue.resume()

    async def set_version(self, epoch: int, version: int) -> None:
        """Name the served weights anew."""
        with self._heard_during(epoch):
            served = self._state.rename(epoch, version)
            label = WeightsLabel(version=served.version, load=served.load)
            await self._to_the_end(self._quiet.engine.set_label(label))

    async def close_session(self, epoch: int) -> None:
        """Leave the process group."""
        with self._heard_during(epoch):
            phase = self._state.phase
            if self._state.close(epoch):
                self._quiet.lose_weights("the session was closed before the verdict")
            await self._end_update(phase)

    async def watch_lease(self) -> None:
        """Reset an update whose sender is silent.

        Waits for: the end of a lease, or a change of it. Unblocked by: every call of a session, and the clock.
        """
        while True:
            end_s = self._state.lease_end_s() if self._num_calls == 0 else None
            if end_s is not None and end_s <= time.monotonic():
                await self._expire()
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if end_s is None else end_s - time.monotonic()):
                    await self.wait_changed()

    async def wait_changed(self) -> None:
        """Waits for: anything that may have changed the state of the weights. Unblocked by: every call."""
        await self._changed.wait()

    async def close(self) -> None:
        await self._end_update(Phase.CLOSED)

    def _check_manifest(self, senders: Manifest) -> None:
        max_rank = self._quiet.engine.info.max_lora_rank
        wrong = wrong_kind(senders, max_rank)
        if wrong:
            raise CallError("FAILED_PRECONDITION", wrong)
        if max_rank:
            kind, differences = "adapter", adapter_differences(senders, self._manifest, max_rank)
        else:
            kind, differences = "tensors", self._manifest.difference(senders)
        if differences:
            shown = "; ".join(differences[:_MAX_LISTED])
            more = f"; and {len(differences) - _MAX_LISTED} more" if len(differences) > _MAX_LISTED else ""
            raise CallError(
                "FAILED_PRECONDITION",
                f"the sender's {kind} {'does' if max_rank else 'do'} not fit this server's model ({len(differences)} "
                f"differences): {shown}{more}",
            )

    async def _wait_until_loaded(self, deadline_s: float) -> None:
        """Waits for: a load that nothing can end, of a trainer that may be gone. Unblocked by: its end, and the time.

        Only a part of the deadline, for the others of the new session wait in its process group meanwhile, and what
        they say when their time is over must not come before this server's words.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s * _WAIT_FOR_LOAD_SHARE):
                while self._state.is_loading:
                    await self.wait_changed()

    async def _meet(self, identity: RunIdentity, meeting: Meeting) -> Update:
        if meeting.way != "direct":
            arrival = await open_arrival(identity, meeting)
            return StagedUpdate(self._quiet, arrival, self._memory_for(meeting.manifest))
        self._drop_memory()
        place = DirectPlace(
            backend=meeting.backend,
            store_host=meeting.store_host,
            store_port=meeting.store_port,
            first_rank=meeting.rank,
            world_size=meeting.world_size,
            epoch=meeting.epoch,
            manifest=meeting.manifest,
            bucket_bytes=meeting.bucket_bytes,
            deadline_s=meeting.deadline_s,
        )
        await self._quiet.engine.join_direct(place)
        return DirectUpdate(self._quiet, meeting.manifest.num_bytes)

    def _memory_for(self, manifest: Manifest) -> HostMemory:
        """What there is, unless it is laid out otherwise, or a receive of a session that has ended still writes it."""
        if self._memory is None or self._memory.copy.manifest != manifest or self._memory.is_written:
            self._drop_memory()
            self._memory = HostMemory(manifest)
        return self._memory

    def _drop_memory(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    async def _expire(self) -> None:
        phase, session = self._state.phase, self._state.session
        logger.warning("the sender is silent: update reset in phase %s, session %s", phase.name, session)
        if self._state.expire():
            self._quiet.lose_weights("the lease ended before the verdict")
        await self._end_update(phase)
        self.notify()

    async def _end_update(self, phase: Phase) -> None:
        """`phase`: in which it was given up."""
        update, self._update = self._update, None
        if update is not None:
            if phase is Phase.RECEIVED:
                await update.reset()
            await update.close()

    def _opened_update(self) -> Update:
        if self._update is None:
            raise CallError("FAILED_PRECONDITION", "the session has not met its process group yet")
        return self._update

    async def _to_the_end(self, work: Coroutine[None, None, Result]) -> Result:
        """Run `work` whole, even if the caller is cancelled: half a load would be a mixture."""
        outcome: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            with self._counted():  # apart from the call, which may have gone away
                try:
                    result = await work
                except (CallError, WeightSyncError) as error:
                    if not outcome.cancelled():
                        outcome.set_exception(error)
                else:
                    if not outcome.cancelled():
                        outcome.set_result(result)

        self._tasks.create_task(run())
        return await outcome

    @contextlib.contextmanager
    def _heard_during(self, epoch: int) -> Iterator[None]:
        """A sender with a call under way is not silent; the lease runs from the end of the call."""
        self._state.check_epoch(epoch)
        with self._counted():
            yield

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            self._hear()

    def _hear(self) -> None:
        self._state.heard(time.monotonic())
        self.notify()

    def notify(self) -> None:
        """Let those look again who wait for a change of what this server is."""
        self._changed.set()
        self._changed = asyncio.Event()
