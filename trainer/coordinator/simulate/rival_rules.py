"""The staleness rules of AReaL, prime-rl, verl and PipelineRL, as read in their sources, in our world.

`eta` is our `settings.max_staleness`; each class says which of its project's settings that is. They are written
from what the projects do, without their code; where a project has no bound, the class says so.
"""

from asyppo_async.trainer.coordinator.decisions import DecisionSettings
from asyppo_async.trainer.coordinator.draws import DrawRecord
from asyppo_async.trainer.coordinator.order import oldest_first
from asyppo_async.trainer.coordinator.sampler import Sampler
from asyppo_async.trainer.coordinator.simulate.rival_rule import Event, RivalRule


class AReaLRule(RivalRule):
    """AReaL (`staleness_manager.py`): capacity (eta + v + 1) B - (accepted + running), nothing checked afterwards.

    Of the finished groups the oldest by creation time are taken. `max_head_offpolicyness` = eta.
    """

    def room(self) -> int:
        accepted_and_running = (
            self.ledger.totals.trained + self.ledger.num_chosen + self.ledger.num_outstanding
        )
        most = (self.settings.max_staleness + self.served_version + 1) * self.settings.batch_size
        return most - accepted_and_running

    def pick(self) -> list[DrawRecord] | None:
        if self.ledger.num_queued < self.settings.batch_size:
            return None
        queued = [record for records in self.ledger.queued.values() for record in records.values()]
        return sorted(queued, key=lambda record: record.admitted_s)[: self.settings.batch_size]


class PrimeRule(RivalRule):
    """prime-rl: engines are kept full, one batch ahead of the trainer; groups older than eta versions are dropped.

    A batch is shipped once the version two steps before its own is published (`TARGET_LAG` = 1), in finishing order;
    dispatch is closed while the orchestrator leads by more than one. Groups dispatched more than eta versions ago
    are dropped before each batch and cancelled in flight when a new version comes (`max_off_policy_steps` = eta).
    Concurrency, which they regulate on KV use, is `max_concurrent_groups`.
    """

    def __init__(self, *, settings: DecisionSettings, sampler: Sampler) -> None:
        super().__init__(settings=settings, sampler=sampler)
        self._shipped: dict[int, list[DrawRecord]] = {}
        """By step: batches that the trainer holds."""

    @property
    def _collecting(self) -> int:
        """The step whose batch is being collected."""
        return max([self.version - 1, *self.ledger.chosen]) + 1

    def room(self) -> int:
        is_open = self._collecting - self.served_version <= 1
        return self.settings.max_concurrent_groups if is_open else 0

    def on_event(self, event: Event) -> None:
        if event == "served":
            oldest = self.served_version - self.settings.max_staleness
            flying = self.ledger.in_flight
            self.cancel([record for v in flying if v < oldest for record in flying[v].values()])
        if event != "issued":
            self._ship()

    def _ship(self) -> None:
        """Ship the batch being collected if it is full and its turn has come."""
        step = self._collecting
        if step > self.served_version + 1:
            return
        oldest = step - self.settings.max_staleness
        stale = [record for record in oldest_first(self.ledger.queued) if record.admission_version < oldest]
        self.drop(stale, "stale")
        if self.ledger.num_queued >= self.settings.batch_size:
            batch = self.in_finish_order()[: self.settings.batch_size]
            self.ledger.choose(batch, step=step)
            self._shipped[step] = batch

    def pick(self) -> list[DrawRecord] | None:
        return self._shipped.pop(self.version, None)


class VerlAsyncRule(RivalRule):
    """verl `fully_async`: at most (eta + 1) B groups dispatched per sync, taken in finishing order.

    The counter starts at what is active and queued when the weights are synchronised (`staleness_threshold` = eta,
    `trigger_parameter_sync_step` = 1). A full queue drops its oldest. No bound on the age of a straggler.
    """

    def __init__(self, *, settings: DecisionSettings, sampler: Sampler) -> None:
        super().__init__(settings=settings, sampler=sampler)
        self._num_dispatched = 0

    @property
    def _most(self) -> int:
        return (self.settings.max_staleness + 1) * self.settings.batch_size

    def room(self) -> int:
        if self.ledger.num_queued >= self._most:
            return 0
        return self._most - self._num_dispatched

    def on_event(self, event: Event) -> None:
        if event == "issued":
            self._num_dispatched += 1
        elif event == "served":
            self._num_dispatched = self.ledger.num_outstanding

    def pick(self) -> list[DrawRecord] | None:
        queue = self.in_finish_order()
        self.drop(queue[: max(0, len(queue) - self._most)], "queue_full")
        queue = queue[max(0, len(queue) - self._most) :]
        return queue[: self.settings.batch_size] if len(queue) >= self.settings.batch_size else None


class VerlV1Rule(RivalRule):
    """verl V1 `separate_async`: (1 + eta) B groups are always on their way, the oldest finished ones train.

    Every batch that trains is replaced by as many prompts, and so is every evicted group. `wait`: no batch while a
    group whose age has reached eta is in flight. `drop`: finished groups older than eta are evicted
    (`max_off_policy_threshold` = eta, `num_warmup_batches` = eta).
    """

    def room(self) -> int:
        most = (self.settings.max_staleness + 1) * self.settings.batch_size
        in_training = self.ledger.num_chosen
        behind = (self.version - self.served_version) * self.settings.batch_size
        return most - in_training - behind - self.ledger.num_outstanding

    def pick(self) -> list[DrawRecord] | None:
        oldest = self.version - self.settings.max_staleness
        if self.settings.on_stale == "drop":
            finished = oldest_first(self.ledger.queued)
            self.drop([record for record in finished if record.admission_version < oldest], "stale")
        elif any(version <= oldest for version in self.ledger.in_flight):
            return None
        batch = list(oldest_first(self.ledger.queued))[: self.settings.batch_size]
        return batch if len(batch) == self.settings.batch_size else None


class PipelineRule(RivalRule):
    """PipelineRL with a lag limit: eta B + B groups may be submitted at first, B more with every version.

    Taken in finishing order, never dropped; stragglers have any age (`max_lag` = eta B K samples).
    """

    def room(self) -> int:
        most = (self.settings.max_staleness + 1 + self.served_version) * self.settings.batch_size
        return most - self.ledger.totals.issued

    def pick(self) -> list[DrawRecord] | None:
        queue = self.in_finish_order()
        return queue[: self.settings.batch_size] if len(queue) >= self.settings.batch_size else None


class PipelineRingRule(PipelineRule):
    """PipelineRL without a lag limit: the engines are always full, and a ring of finished groups drops its oldest.

    The ring holds two batches here, or their 128 entries if that is more.
    """

    RING_ENTRIES = 128

    def room(self) -> int:
        return self.settings.max_concurrent_groups

    def pick(self) -> list[DrawRecord] | None:
        queue = self.in_finish_order()
        ring = max(self.RING_ENTRIES, 2 * self.settings.batch_size)
        self.drop(queue[: max(0, len(queue) - ring)], "ring_full")
        return super().pick()
