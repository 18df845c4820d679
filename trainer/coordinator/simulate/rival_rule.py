"""What the rules of other projects have in common when they run in our world: our ledger, their decisions."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Literal

from asyppo_async.trainer.coordinator.decisions import DecisionSettings, StepReport
from asyppo_async.trainer.coordinator.draws import (
    Answer,
    Draw,
    DrawRecord,
    GroupFacts,
    LedgerCounts,
    News,
    TokenCounts,
    TokenUse,
)
from asyppo_async.trainer.coordinator.ledger import Ledger
from asyppo_async.trainer.coordinator.order import Chosen, Waiting, chosen_draw
from asyppo_async.trainer.coordinator.sampler import Sampler

Event = Literal["served", "issued", "finished"]


class RivalRule(ABC):
    """A `Rule` with the ledger kept here; a subclass says how many may start and which finished groups train.

    None of these rules re-issues a draw: what they drop is replaced by the next prompt. None masks tokens by age,
    so every token of a batch has weight.
    """

    def __init__(self, *, settings: DecisionSettings, sampler: Sampler) -> None:
        self.settings = settings
        self.ledger = Ledger()
        self._sampler = sampler
        self._version = 0
        self.served_version = -1
        self._chosen: Chosen | None = None
        self._waiting_since_s: float | None = None
        self._began_s = 0.0
        self._max_staleness_seen = 0
        self._cancelled: list[Draw] = []
        self._now_s = 0.0

    @abstractmethod
    def room(self) -> int:
        """How many groups may be started now, the concurrency limit aside."""

    @abstractmethod
    def pick(self) -> list[DrawRecord] | None:
        """The batch of the present step; None: it is not there yet."""

    def on_event(self, event: Event) -> None:
        """For rules that do something then: a version is served everywhere, a group was started, one is queued."""
        del event

    @property
    def version(self) -> int:
        return self._version

    @property
    def finished(self) -> bool:
        return self._version == self.settings.num_steps

    @property
    def max_staleness_seen(self) -> int:
        return self._max_staleness_seen

    def served(self, version: int) -> bool:
        if version <= self.served_version:
            return False
        self.served_version = version
        self.on_event("served")
        return True

    def admit(self, now_s: float) -> list[Draw]:
        self._now_s = now_s
        if self.served_version < 0:
            return []
        draws: list[Draw] = []
        while min(self.room(), self.settings.max_concurrent_groups - self.ledger.num_in_flight) > 0:
            candidate = self._sampler.next_candidate()
            draws.append(self.ledger.issue(candidate, version=self.served_version, now_s=now_s))
            self.on_event("issued")
        return draws

    def record_tokens(self, draw: Draw, num_tokens: int) -> None:
        if (record := self.ledger.find(draw, "in_flight")) is not None:
            self.ledger.record_tokens(record, num_tokens)

    def finish(
        self,
        draw: Draw,
        *,
        num_members: int,
        num_tokens: int,
        oldest_version: int,
        newest_version: int,
        now_s: float,
    ) -> Answer:
        if (record := self.ledger.find(draw, "in_flight")) is None:
            return "late"
        self._now_s = now_s
        self.ledger.record_tokens(record, num_tokens)
        group = GroupFacts(
            num_members=num_members,
            num_tokens=num_tokens,
            oldest_version=oldest_version,
            newest_version=newest_version,
        )
        self.ledger.queue(record, group, version=self._version, now_s=now_s)
        self.on_event("finished")
        return "queued"

    def filter(self, draw: Draw, *, reason: str, now_s: float) -> Answer:
        if (record := self.ledger.find(draw, "in_flight", "queued")) is None:
            return "late"
        self.ledger.filter(record, reason, version=self._version, now_s=now_s)
        return "filtered"

    def fail(self, draw: Draw, *, reason: str, now_s: float) -> Answer:
        if (record := self.ledger.find(draw, "in_flight", "queued")) is None:
            return "late"
        self.ledger.drop(record, reason, version=self._version, now_s=now_s)
        return "dropped"

    def choose_batch(self, now_s: float) -> Chosen | Waiting:
        self._now_s = now_s
        if self._chosen is not None:
            return self._chosen
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        records = self.pick()
        waited_s = now_s - self._waiting_since_s
        if records is None:
            return Waiting(
                step=self._version,
                num_ready=self.ledger.num_queued,
                num_wanted=self.settings.batch_size,
                due=(),
                waited_s=waited_s,
            )
        self._waiting_since_s = None
        if self._version not in self.ledger.chosen:
            self.ledger.choose(records, step=self._version)
        self._chosen = Chosen(
            step=self._version,
            draws=tuple(chosen_draw(record, step=self._version, now_s=now_s) for record in records),
            token_bound=0,
            waited_s=waited_s,
        )
        worst = max(draw.staleness for draw in self._chosen.draws)
        self._max_staleness_seen = max(self._max_staleness_seen, worst)
        return self._chosen

    def choose_ahead(self, now_s: float) -> Chosen | Waiting | None:
        del now_s
        raise ValueError("only the decision core trains critics ahead")

    def begin_step(self, now_s: float) -> None:
        self._began_s = now_s

    def end_step(self, now_s: float, use: TokenUse) -> StepReport:
        assert self._chosen is not None, f"step {self._version} has no batch"
        chosen, self._chosen = self._chosen, None
        self.ledger.train(self._version, use, now_s=now_s)
        self._version += 1
        return StepReport(
            step=chosen.step,
            draws=chosen.draws,
            use=use,
            waited_s=chosen.waited_s,
            step_s=now_s - self._began_s,
            lead_limit=self.ledger.num_outstanding,
            news=self.ledger.take_news(),
        )

    def close(self, now_s: float) -> News:
        for step in list(self.ledger.chosen):
            self.ledger.unchoose(step)
        self.ledger.drop_all("run_ended", version=self._version, now_s=now_s)
        return self.ledger.take_news()

    def counts(self) -> LedgerCounts:
        return self.ledger.counts()

    def token_counts(self) -> TokenCounts:
        return self.ledger.token_counts()

    def take_cancelled(self) -> list[Draw]:
        """Attempts in flight that the rule has given up; the world stops them and calls `fail`."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def cancel(self, records: Iterable[DrawRecord]) -> None:
        """Give up attempts in flight."""
        self._cancelled += [record.draw for record in records]

    def in_finish_order(self) -> list[DrawRecord]:
        """Finished groups, the first to finish first."""
        queued = [record for records in self.ledger.queued.values() for record in records.values()]
        return sorted(queued, key=lambda record: record.finish_order)

    def drop(self, records: Iterable[DrawRecord], reason: str) -> None:
        """Give up finished groups."""
        for record in list(records):
            self.ledger.drop(record, reason, version=self._version, now_s=self._now_s)
