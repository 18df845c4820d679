"""From one version to the next in the engine, under a pause, in both ways; what it costs where it fails."""

import logging
import time
from dataclasses import dataclass
from typing import Protocol

from asyppo_async.errors import WeightSyncError
from asyppo_async.fleet.call_error import CallError
from asyppo_async.fleet.engine.protocol import Engine, KvOnUpdate, WeightsLabel
from asyppo_async.fleet.host_memory import HostMemory
from asyppo_async.fleet.rollouts import RolloutFloor
from asyppo_async.fleet.staging import Arrival
from asyppo_async.fleet.update_state import Served, UpdateState
from asyppo_async.weights.transfer import ReceiveReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitTimes:
    pause_s: float
    load_s: float
    """In the direct way from the first bucket on."""
    resume_s: float


class Update(Protocol):
    """What a session does with its versions."""

    touches_engine: bool
    """`stage` loads already, so it has to run to its end, whoever goes away."""

    async def stage(
        self, epoch: int, version: int, base_version: int, deadline_s: float, kv_on_update: KvOnUpdate
    ) -> ReceiveReport: ...

    async def commit(
        self, epoch: int, version: int, checksums: tuple[int, ...], kv_on_update: KvOnUpdate
    ) -> CommitTimes: ...

    async def reset(self) -> None:
        """The update will not go on, and the state says so already: let the engine leave it."""
        ...

    async def close(self) -> None:
        """The session has ended."""
        ...


class Quiet:
    """Everything that has to happen around a load, whatever loads."""

    def __init__(self, floor: RolloutFloor) -> None:
        self._floor = floor
        self.engine: Engine = floor.engine
        self.state: UpdateState = floor.state

    async def begin(self, candidate: Served, kv_on_update: KvOnUpdate) -> float:
        """Nothing computes any more; returns the seconds that this took."""
        started_s = time.monotonic()
        self._floor.queue.hold()
        await self.engine.pause(kv_on_update)
        await self._floor.recall_unstarted()
        self._end_foreign_calls(candidate)
        return time.monotonic() - started_s

    async def broken(self, reason: str) -> None:
        """A mixture was loaded: nothing is released before a complete version has passed."""
        self.lose_weights(reason)
        await self.engine.resume()

    def lose_weights(self, reason: str) -> None:
        logger.error("weights unknown: %s", reason)
        self._floor.queue.hold()
        self._floor.end_all(CallError("UNAVAILABLE", f"weights unknown: {reason}"))

    def _end_foreign_calls(self, candidate: Served) -> None:
        """A version counts within its run, so a response cannot go on under the weights of another one."""
        served = self.state.served
        if served is not None and served.identity != candidate.identity:
            self._floor.end_all(
                CallError("UNAVAILABLE", "another run has published its weights to this server")
            )


def label_of(candidate: Served) -> WeightsLabel:
    return WeightsLabel(version=candidate.version, load=candidate.load)


class StagedUpdate:
    """Bytes arrive in host memory beside the generation; the commit loads them."""

    touches_engine = False

    def __init__(self, quiet: Quiet, arrival: Arrival, memory: HostMemory) -> None:
        self._quiet = quiet
        self._state = quiet.state
        self._arrival = arrival
        self._memory = memory
        self._is_over = False

    async def stage(
        self, epoch: int, version: int, base_version: int, deadline_s: float, kv_on_update: KvOnUpdate
    ) -> ReceiveReport:
        """Whatever fails here leaves the old version serving."""
        self._state.stage_begins(epoch, version)
        arrived = False
        try:
            report = await self._arrival.receive(self._memory, version, base_version, deadline_s)
            arrived = True
        finally:
            if not arrived and not self._is_over:  # else a newer session has taken over
                self._state.fail_stage()
                await self.close()
        if self._is_over:
            raise CallError("ABORTED", f"epoch {epoch} was replaced while version {version} arrived")
        self._state.stage_ends(version)
        return report

    async def commit(
        self, epoch: int, version: int, checksums: tuple[int, ...], kv_on_update: KvOnUpdate
    ) -> CommitTimes:
        engine, state = self._quiet.engine, self._state
        candidate = state.commit_begins(epoch, version)
        try:
            if state.served is None:
                self._memory.unloaded()
            staged = self._memory.staged(checksums)
            await engine.verify_staged(staged)
        except WeightSyncError as error:
            state.refuse_commit()
            raise CallError("DATA_LOSS", f"{error}; the version before goes on serving") from error
        self._memory.unloaded()  # until the load is complete
        try:
            pause_s = await self._quiet.begin(candidate, kv_on_update)
            paused_s = time.monotonic()
            await engine.load_staged(staged, label_of(candidate))
            loaded_s = time.monotonic()
            await engine.resume()
        except WeightSyncError as error:
            state.break_update()
            await self._quiet.broken(f"loading version {version} failed: {error}")
            raise CallError(
                "INTERNAL", f"{error}; weights unknown until a complete version is published"
            ) from error
        self._memory.loaded()
        state.commit_ends()
        return CommitTimes(pause_s=pause_s, load_s=loaded_s - paused_s, resume_s=time.monotonic() - loaded_s)

    async def reset(self) -> None:
        pass

    async def close(self) -> None:
        self._is_over = True
        self._arrival.close()


class DirectUpdate:
    """The engine's workers are ranks of the session themselves, and load each bucket as it arrives, under a pause."""

    touches_engine = True

    def __init__(self, quiet: Quiet, num_bytes: int) -> None:
        """`num_bytes`: of one version."""
        self._quiet = quiet
        self._state = quiet.state
        self._num_bytes = num_bytes
        self._pause_s = 0.0
        self._paused_s = 0.0

    async def stage(
        self, epoch: int, version: int, base_version: int, deadline_s: float, kv_on_update: KvOnUpdate
    ) -> ReceiveReport:
        """Whatever fails here leaves the weights unknown."""
        engine, state = self._quiet.engine, self._state
        candidate = state.receive_begins(epoch, version)
        try:
            self._pause_s = await self._quiet.begin(candidate, kv_on_update)
            self._paused_s = time.monotonic()
            await engine.receive_direct(deadline_s)
        except WeightSyncError as error:
            state.break_update()
            state.fail_stage()
            await self._quiet.broken(f"receiving version {version} failed: {error}")
            raise WeightSyncError(
                f"{error}; weights unknown until a complete version is published"
            ) from error
        state.receive_ends()
        wire_s = time.monotonic() - self._paused_s
        return ReceiveReport(checksums=(), num_bytes=self._num_bytes, wire_s=wire_s)

    async def commit(
        self, epoch: int, version: int, checksums: tuple[int, ...], kv_on_update: KvOnUpdate
    ) -> CommitTimes:
        engine, state = self._quiet.engine, self._state
        candidate = state.commit_begins(epoch, version)
        try:
            await engine.finish_direct(checksums, label_of(candidate))
            loaded_s = time.monotonic()
            await engine.resume()
        except WeightSyncError as error:
            state.break_update()
            await self._quiet.broken(f"version {version} could not be finished: {error}")
            raise CallError(
                "DATA_LOSS", f"{error}; weights unknown until a complete version is published"
            ) from error
        state.commit_ends()
        return CommitTimes(
            pause_s=self._pause_s,
            load_s=loaded_s - self._paused_s,
            resume_s=time.monotonic() - loaded_s,
        )

    async def reset(self) -> None:
        """The engine waits in the middle of an update for a sender that will not come back."""
        await self._quiet.engine.abort_direct("its sender is silent")
        await self._quiet.engine.resume()

    async def close(self) -> None:
        await self._quiet.engine.leave_direct()
