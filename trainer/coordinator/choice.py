"""Choice: the batch of a step, by order rule and consumption policy."""

from asyppo_async.trainer.coordinator.decisions import DecisionSettings
from asyppo_async.trainer.coordinator.lead import LeadController
from asyppo_async.trainer.coordinator.ledger import Ledger
from asyppo_async.trainer.coordinator.order import (
    Chosen,
    Overtaken,
    Waiting,
    batch_of,
    chosen_draw,
    first_overtaken,
    oldest_first,
)
from asyppo_async.trainer.coordinator.retry import Retry
from asyppo_async.trainer.coordinator.sampler import Sampler
from asyppo_async.trainer.coordinator.staleness import is_stale, token_bound


class BatchChoice:
    """Which groups make a batch.

    Invariants: under `wait` and `drop` no chosen group is older than the bound; under `wait` no unfinished group
    is overtaken that could not be on time afterwards. `mask` and `drop` wait for a full batch only.
    """

    def __init__(
        self,
        *,
        settings: DecisionSettings,
        ledger: Ledger,
        sampler: Sampler,
        retry: Retry,
        lead: LeadController,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._sampler = sampler
        self._retry = retry
        self._lead = lead
        self.chosen: dict[int, Chosen] = {}
        """By step, until it has ended: the present one and the one ahead."""
        self.max_staleness_seen = 0

    def choose(self, step: int, *, version: int, now_s: float) -> Chosen | Waiting:
        """The batch of `step`; once chosen it stays.

        Raises:
            Stalled: nothing is on its way, and too many draws were filtered or dropped to try more.
        """
        if step in self.chosen:
            return self.chosen[step]
        is_ahead = step > version
        if is_ahead:
            self._lead.batch_ahead_wanted()
        self._return_stale(step=step, version=version, now_s=now_s)
        num_ready, num_wanted = self._ledger.num_queued, self._num_wanted
        is_short = num_ready < num_wanted or num_wanted == 0
        overtaken = None if is_short else self._overtaken(step=step)
        if is_short or overtaken is not None:
            self._retry.raise_if_hopeless(step)
            return Waiting(
                step=step,
                num_ready=num_ready,
                num_wanted=num_wanted,
                due=() if overtaken is None else tuple(record.draw for record in overtaken.records),
                waited_s=0.0 if is_ahead else self._lead.waiting(shortage=is_short, now_s=now_s),
            )
        records = batch_of(self._ledger.queued, num_chosen=num_wanted)
        self._ledger.choose(records, step=step)
        self._retry.batch_chosen()
        self.chosen[step] = Chosen(
            step=step,
            draws=tuple(chosen_draw(record, step=step, now_s=now_s) for record in records),
            token_bound=token_bound(step=step, max_staleness=self._settings.max_staleness),
            waited_s=self._lead.chosen(num_surplus=self._ledger.num_queued, now_s=now_s),
        )
        self.max_staleness_seen = max(
            self.max_staleness_seen, *(draw.staleness for draw in self.chosen[step].draws)
        )
        return self.chosen[step]

    def exists(self, step: int) -> bool:
        """Whether a step that has no batch yet can get one: within the run, and prompts or draws are left."""
        num_steps = self._settings.num_steps
        return self._num_wanted > 0 and (num_steps is None or step < num_steps)

    def undo(self) -> None:
        """The chosen steps will not be: their groups are queued again."""
        for step in self.chosen:
            self._ledger.unchoose(step)
        self.chosen.clear()

    @property
    def _num_wanted(self) -> int:
        """Groups of the next batch: fewer than B only when the prompts are used up."""
        if self._sampler.exhausted:
            left = self._ledger.num_outstanding + len(self._ledger.returned)
            return min(self._settings.batch_size, left)
        return self._settings.batch_size

    def _return_stale(self, *, step: int, version: int, now_s: float) -> None:
        """`drop`: groups that would be beyond the bound at `step` leave the queue."""
        if self._settings.on_stale == "drop":
            for record in list(oldest_first(self._ledger.queued)):
                if is_stale(record, step=step, max_staleness=self._settings.max_staleness):
                    self._retry.fail(record, "stale", version=version, now_s=now_s)

    def _overtaken(self, *, step: int) -> Overtaken | None:
        """`wait`: the unfinished groups that forbid the batch of `step`; None if there are none."""
        if self._settings.on_stale != "wait":
            return None
        return first_overtaken(
            self._ledger.queued,
            self._ledger.in_flight,
            step=step,
            batch_size=self._settings.batch_size,
            num_chosen=self._num_wanted,
            max_staleness=self._settings.max_staleness,
        )
