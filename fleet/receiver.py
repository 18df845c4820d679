"""Weight updates: the transitions of `UpdateState` carried out on the engine, the queue and the running calls."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import TypeVar

from asyppo_async.errors import WeightSyncError
from asyppo_async.fleet.call_error import CallError
from asyppo_async.fleet.engine.protocol import Engine, KvOnUpdate, StagedWeights, WeightsLabel
from asyppo_async.fleet.prober import ProbeOutcome, Prober, ProbeWork
from asyppo_async.fleet.rollouts import RolloutFloor
from asyppo_async.fleet.staging import Meeting, StagingArea
from asyppo_async.fleet.update_state import Served, Session, UpdateState
from asyppo_async.weights.manifest import Manifest
from asyppo_async.weights.transfer import ReceiveReport

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_MAX_LISTED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitTimes:
    pause_s: float
    load_s: float
    resume_s: float


class Receiver:
    """`tasks` runs commits to their end even if their caller goes away."""

    def __init__(
        self,
        *,
        floor: RolloutFloor,
        manifest: Manifest,
        num_probe_slots: int,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._floor = floor
        self._engine: Engine = floor.engine
        self._state: UpdateState = floor.state
        self._manifest = manifest
        self._prober = Prober(floor.engine, num_probe_slots)
        self._tasks = tasks
        self._area: StagingArea | None = None
        self._num_calls = 0
        self._changed = asyncio.Event()

    async def open_session(self, session: Session, meeting: Meeting) -> None:
        """Check the manifest both ways, end any older session, meet the others."""
        differences = self._manifest.difference(meeting.manifest)
        if differences:
            shown = "; ".join(differences[:_MAX_LISTED])
            more = f"; and {len(differences) - _MAX_LISTED} more" if len(differences) > _MAX_LISTED else ""
            raise CallError(
                "FAILED_PRECONDITION",
                f"the sender's tensors are not this server's ({len(differences)} differences): {shown}{more}",
            )
        if self._state.open(session, time.monotonic()):
            self._lose_weights("a new session began before the verdict on the last version")
        self._drop_area()
        with self._heard_during(session.epoch):
            try:
                area = await StagingArea.join(meeting)
            except (ValueError, WeightSyncError, asyncio.CancelledError) as error:
                if self._state.session is session:
                    self._state.fail_stage()
                if isinstance(error, ValueError):
                    raise CallError("INVALID_ARGUMENT", str(error)) from error
                raise
        if self._state.session is not session:  # a newer one began while this one waited for its ranks
            area.close()
            raise CallError("ABORTED", f"epoch {session.epoch} was replaced by a newer session")
        self._area = area

    async def stage(self, epoch: int, version: int, deadline_s: float) -> ReceiveReport:
        """Receive one version beside the generation; whatever fails here leaves the old one serving."""
        with self._heard_during(epoch):
            self._state.stage_begins(epoch, version)
            area = self._opened_area()
            try:
                report = await area.receive(deadline_s)
            except (WeightSyncError, asyncio.CancelledError):
                if self._area is area:  # else a newer session has taken over
                    self._state.fail_stage()
                    self._drop_area()
                raise
            if self._area is not area:
                raise CallError("ABORTED", f"epoch {epoch} was replaced while version {version} arrived")
            self._state.stage_ends(version)
            return report

    async def commit(
        self, epoch: int, version: int, checksums: tuple[int, ...], kv_on_update: KvOnUpdate
    ) -> CommitTimes:
        """Load what is staged and go on, on probation."""
        with self._heard_during(epoch):
            candidate = self._state.commit_begins(epoch, version)
            return await self._to_the_end(self._commit(candidate, checksums, kv_on_update))

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
                self._lose_weights(f"version {version} failed its probe")
            else:
                self._floor.gate.release(served.load)
                self._floor.queue.resume()

    async def set_version(self, epoch: int, version: int) -> None:
        """Name the served weights anew."""
        with self._heard_during(epoch):
            served = self._state.rename(epoch, version)
            label = WeightsLabel(version=served.version, load=served.load)
            await self._to_the_end(self._engine.set_label(label))

    def close_session(self, epoch: int) -> None:
        """Leave the process group."""
        with self._heard_during(epoch):
            if self._state.close(epoch):
                self._lose_weights("the session was closed before the verdict")
            self._drop_area()

    async def watch_lease(self) -> None:
        """Reset an update whose sender is silent.

        Waits for: the end of a lease, or a change of it. Unblocked by: every call of a session, and the clock.
        """
        while True:
            end_s = self._state.lease_end_s() if self._num_calls == 0 else None
            if end_s is not None and end_s <= time.monotonic():
                self._expire()
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if end_s is None else end_s - time.monotonic()):
                    await self.wait_changed()

    async def wait_changed(self) -> None:
        """Waits for: anything that may have changed the state of the weights. Unblocked by: every call."""
        await self._changed.wait()

    def close(self) -> None:
        self._drop_area()

    async def _commit(
        self, candidate: Served, checksums: tuple[int, ...], kv_on_update: KvOnUpdate
    ) -> CommitTimes:
        with self._counted():  # apart from the call, which may have gone away
            try:
                staged = self._opened_area().staged(checksums)
                await self._engine.verify_staged(staged)
            except WeightSyncError as error:
                self._state.refuse_commit()
                raise CallError("DATA_LOSS", f"{error}; the version before goes on serving") from error
            try:
                times = await self._load(candidate, staged, kv_on_update)
            except WeightSyncError as error:
                self._state.break_commit()
                self._lose_weights(f"loading version {candidate.version} failed: {error}")
                await self._engine.resume()
                raise CallError(
                    "INTERNAL", f"{error}; weights unknown until a complete version is published"
                ) from error
            self._state.commit_ends()
            return times

    async def _load(self, candidate: Served, staged: StagedWeights, kv_on_update: KvOnUpdate) -> CommitTimes:
        started_s = time.monotonic()
        self._floor.queue.hold()
        await self._engine.pause(kv_on_update)
        await self._floor.recall_unstarted()
        self._end_foreign_calls(candidate)
        paused_s = time.monotonic()
        label = WeightsLabel(version=candidate.version, load=candidate.load)
        await self._engine.load_staged(staged, label)
        loaded_s = time.monotonic()
        await self._engine.resume()
        return CommitTimes(
            pause_s=paused_s - started_s, load_s=loaded_s - paused_s, resume_s=time.monotonic() - loaded_s
        )

    def _end_foreign_calls(self, candidate: Served) -> None:
        """A version counts within its run, so a response cannot go on under the weights of another one."""
        served = self._state.served
        if served is not None and served.identity != candidate.identity:
            self._floor.end_all(
                CallError("UNAVAILABLE", "another run has published its weights to this server")
            )

    def _lose_weights(self, reason: str) -> None:
        logger.error("weights unknown: %s", reason)
        self._floor.queue.hold()
        self._floor.end_all(CallError("UNAVAILABLE", f"weights unknown: {reason}"))

    def _expire(self) -> None:
        phase, session = self._state.phase, self._state.session
        logger.warning("the sender is silent: update reset in phase %s, session %s", phase.name, session)
        if self._state.expire():
            self._lose_weights("the lease ended before the verdict")
        self._drop_area()
        self._notify()

    def _drop_area(self) -> None:
        area, self._area = self._area, None
        if area is not None:
            area.close()

    def _opened_area(self) -> StagingArea:
        if self._area is None:
            raise CallError("FAILED_PRECONDITION", "the session has not met its process group yet")
        return self._area

    async def _to_the_end(self, work: Coroutine[None, None, Result]) -> Result:
        """Run `work` whole, even if the caller is cancelled: half a load would be a mixture."""
        outcome: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

        async def run() -> None:
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
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
