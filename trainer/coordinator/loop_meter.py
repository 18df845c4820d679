"""What the loop around a step measures: waits, queues, idleness, and how long weights wait until they are used."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from asyppo_async.metrics import Metrics, mean_of
from asyppo_async.trainer.coordinator.batch import Batch
from asyppo_async.trainer.coordinator.core import DecisionCore
from asyppo_async.trainer.coordinator.decisions import StepReport
from asyppo_async.trainer.coordinator.publication import Publication
from asyppo_async.trainer.coordinator.report import ledger_metrics
from asyppo_async.trainer.coordinator.trace import Trace
from asyppo_async.trainer.coordinator.waits import LoopLag


class IdleClock:
    """Adds up the time in which nothing is under way."""

    def __init__(self) -> None:
        self._num_busy = 0
        self._since_s = time.monotonic()
        self._idle_s = 0.0

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While the block runs, something is."""
        self._settle()
        self._num_busy += 1
        try:
            yield
        finally:
            self._settle()
            self._num_busy -= 1

    def take(self) -> float:
        """Idle seconds since the last call."""
        self._settle()
        idle_s, self._idle_s = self._idle_s, 0.0
        return idle_s

    def _settle(self) -> None:
        now_s = time.monotonic()
        if not self._num_busy:
            self._idle_s += now_s - self._since_s
        self._since_s = now_s


class LoopMeter:
    """Everything of a step's row that the step itself does not know."""

    def __init__(self, core: DecisionCore, lag: LoopLag) -> None:
        self._core = core
        self._lag = lag
        self.fleet = IdleClock()
        """Busy while the fleet has a group to generate."""
        self._pushed_s: dict[int, float] = {}
        """When each version was served that no batch has used yet."""
        self._first_uses_s: list[float] = []

    def pushed(self, version: int) -> None:
        """All servers have that version."""
        self._pushed_s[version] = time.monotonic()

    def begins(self, batch: Batch) -> None:
        """A step begins with tokens of some versions, which may be the first ones of theirs."""
        if not self._pushed_s:
            return
        used = {
            version
            for group in batch.groups
            for trajectory in group.trajectories
            for version in (trajectory.response.versions.oldest, trajectory.response.versions.newest)
        }
        now_s = time.monotonic()
        for version in used & self._pushed_s.keys():
            self._first_uses_s.append(now_s - self._pushed_s[version])
        if used:  # what is older than the newest one that is used will not be used for the first time
            self._pushed_s = {each: at_s for each, at_s in self._pushed_s.items() if each > max(used)}

    def row(
        self,
        report: StepReport,
        publication: Publication | None,
        seconds: float,
        waited_s: float,
        trace: Trace,
    ) -> Metrics:
        """Of the step that has ended; `seconds` from the request for its batch, of which `waited_s` for the batch."""
        counts = self._core.counts()
        first_uses_s, self._first_uses_s = self._first_uses_s, []
        row = {
            "time/step_s": seconds,
            "time/wait_s": waited_s,
            "time/publication_s": trace.seconds("publication"),
            "loop/lag_max_s": self._lag.take(),
            "rollout/idle_s": self.fleet.take(),
            "rollout/in_flight_mean_s": mean_of(draw.in_flight_s for draw in report.draws),
            "rollout/in_queue_mean_s": mean_of(draw.in_queue_s for draw in report.draws),
            "queue/groups": float(counts.queued),
            "queue/in_flight_groups": float(counts.in_flight),
            "queue/lead_limit_groups": float(report.lead_limit),
        }
        if first_uses_s:
            row["staleness/push_to_first_use_s"] = mean_of(first_uses_s)
        row |= ledger_metrics(counts, self._core.token_counts())
        return row if publication is None else row | publication.metrics()
