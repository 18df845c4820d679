"""The decision core: every choice of the coordinator behind one facade, without I/O, threads or clocks.

The event loop and the discrete-event simulator drive the same object. Time is an argument (`now_s`, monotonic
seconds). Every method is a transition that ends before it returns; a message about an attempt that has ended is
answered `late` and changes nothing but a counter.
"""

from collections.abc import Collection

from asyppo_async.trainer.coordinator.admission import Admission
from asyppo_async.trainer.coordinator.choice import BatchChoice
from asyppo_async.trainer.coordinator.decisions import CoreState, DecisionSettings, StepReport
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
from asyppo_async.trainer.coordinator.invariants import check_core
from asyppo_async.trainer.coordinator.lead import LeadController
from asyppo_async.trainer.coordinator.ledger import Ledger
from asyppo_async.trainer.coordinator.order import Chosen, Waiting
from asyppo_async.trainer.coordinator.retry import Retry
from asyppo_async.trainer.coordinator.sampler import Sampler
from asyppo_async.trainer.coordinator.staleness import group_fault


class DecisionCore:
    """Sampler, admission, ledger, order, staleness and retry of one run.

    One step of the trainer: `choose_batch` until it gives `Chosen`, `begin_step`, train, `end_step` (version + 1,
    also when nothing was trainable), publish, `served`. Around it, whenever something happened: `admit`.
    """

    def __init__(self, *, settings: DecisionSettings, sampler: Sampler, debug: bool) -> None:
        """`debug`: every transition is followed by `check`."""
        self.settings = settings
        self._sampler = sampler
        self._debug = debug
        self._ledger = Ledger()
        self._retry = Retry(ledger=self._ledger, settings=settings)
        self._lead = LeadController(settings)
        self._admission = Admission(
            settings=settings, ledger=self._ledger, sampler=sampler, retry=self._retry
        )
        self._choice = BatchChoice(
            settings=settings, ledger=self._ledger, sampler=sampler, retry=self._retry, lead=self._lead
        )
        self._version = 0
        self._served_version = -1
        self._step_began_s: float | None = None

    @property
    def version(self) -> int:
        """Training steps completed."""
        return self._version

    @property
    def served_version(self) -> int:
        """The version that the whole fleet serves; -1 before the first publication."""
        return self._served_version

    @property
    def max_staleness_seen(self) -> int:
        """Of any group in any batch chosen so far (under `mask` its older tokens had no weight)."""
        return self._choice.max_staleness_seen

    @property
    def num_steps_chosen(self) -> int:
        """Steps whose batch is fixed: the ended ones, the present one and the one ahead."""
        return self._version + len(self._choice.chosen)

    @property
    def finished(self) -> bool:
        """Whether no step is left: the last one has ended, or the prompts are used up."""
        return not (self._choice.chosen or self._choice.exists(self._version))

    def counts(self) -> LedgerCounts:
        return self._ledger.counts()

    def token_counts(self) -> TokenCounts:
        return self._ledger.token_counts()

    def live(self) -> tuple[DrawRecord, ...]:
        """Copies of the records of all draws that have not ended."""
        return self._ledger.records()

    def admit(self, now_s: float) -> list[Draw]:
        """Every draw that may be started now, at the served version; given-back draws first.

        Raises:
            TaskError: a selecting sampler accepted none of very many candidates.
        """
        draws = self._admission.start(
            served_version=self._served_version,
            num_steps_chosen=self.num_steps_chosen,
            lead_limit=self._lead.limit,
            now_s=now_s,
        )
        self._checked()
        return draws

    def record_tokens(self, draw: Draw, num_tokens: int, server: str = "") -> None:
        """How many tokens this attempt has generated so far, over all its members, and where; empty: as before."""
        if (record := self._ledger.find(draw, "in_flight")) is not None:
            self._ledger.record_tokens(record, num_tokens, server)

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
        """The group is complete (or `reduced`: fewer members than asked) and rewarded: it waits for its step.

        `num_tokens` and versions are of the `num_members` that are left; too few, or an impossible version, fail it.
        """
        if (record := self._ledger.find(draw, "in_flight")) is None:
            return "late"
        self._ledger.record_tokens(record, num_tokens)
        group = GroupFacts(
            num_members=num_members,
            num_tokens=num_tokens,
            oldest_version=oldest_version,
            newest_version=newest_version,
        )
        fault = group_fault(group, record, self.settings, version=self._version)
        if fault is not None:
            return self._fail(record, fault, now_s)
        self._ledger.queue(record, group, version=self._version, now_s=now_s)
        self._ledger.totals.reduced += num_members < self.settings.group_size
        self._checked()
        return "queued"

    def filter(self, draw: Draw, *, reason: str, now_s: float) -> Answer:
        """The group has nothing to teach (all right, all wrong): the draw ends here and gives its slot back."""
        if (record := self._ledger.find(draw, "in_flight", "queued")) is None:
            return "late"
        self._ledger.filter(record, reason, version=self._version, now_s=now_s)
        self._retry.give_up(reason)
        self._checked()
        return "filtered"

    def fail(self, draw: Draw, *, reason: str, now_s: float) -> Answer:
        """The attempt is lost: the draw gets another one while attempts remain, else it is dropped."""
        record = self._ledger.find(draw, "in_flight", "queued")
        return "late" if record is None else self._fail(record, reason, now_s)

    def served(self, version: int) -> bool:
        """The whole fleet serves `version`, probe passed. False: it was known (sent again, joiner, retry).

        Raises:
            ValueError: a version that the trainer has not reached.
        """
        if version > self._version:
            raise ValueError(f"version {version} cannot be served, the trainer is at {self._version}")
        if version <= self._served_version:
            return False
        self._served_version = version
        self._checked()
        return True

    def choose_batch(self, now_s: float) -> Chosen | Waiting:
        """The batch of the present step; once chosen, the same one until the step has ended.

        Raises:
            ValueError: the run is `finished`.
            Stalled: nothing is in flight, and too many draws were filtered or dropped to try more.
        """
        if self.finished:
            raise ValueError(f"the run has ended at version {self._version}, there is no further batch")
        return self._choose(self._version, now_s)

    def choose_ahead(self, now_s: float) -> Chosen | Waiting | None:
        """`critic_ahead`: the batch of the step after the present one, by the order rule of that step.

        None: there is no such step.

        Raises:
            ValueError: `max_staleness` is 0, or the present step has no batch yet.
        """
        step = self._version + 1
        if self.settings.max_staleness < 1 or self._version not in self._choice.chosen:
            raise ValueError(f"the batch ahead of step {step - 1} needs max_staleness >= 1 and its batch")
        return self._choose(step, now_s) if self._choice.exists(step) else None

    def begin_step(self, now_s: float) -> None:
        """The trainer takes the chosen batch."""
        if self._version not in self._choice.chosen or self._step_began_s is not None:
            raise ValueError(f"step {self._version} has no batch, or has begun already")
        self._step_began_s = now_s

    def end_step(self, now_s: float, use: TokenUse) -> StepReport:
        """The step is over: version + 1, also when nothing was trainable. `use` covers the tokens of the batch."""
        chosen = self._choice.chosen.get(self._version)
        if chosen is None or self._step_began_s is None:
            raise ValueError(f"step {self._version} has not begun")
        if use.total != chosen.num_tokens:
            raise ValueError(f"step {chosen.step} has {chosen.num_tokens} tokens, got the use of {use.total}")
        self._ledger.train(chosen.step, use, now_s=now_s)
        del self._choice.chosen[chosen.step]
        report = StepReport(
            step=chosen.step,
            draws=chosen.draws,
            use=use,
            waited_s=chosen.waited_s,
            step_s=now_s - self._step_began_s,
            lead_limit=self._lead.limit,
            news=self._ledger.take_news(),
        )
        self._version += 1
        self._step_began_s = None
        self._checked()
        return report

    def close(self, now_s: float) -> News:
        """The run ends: what is still live is dropped as `run_ended`. What was listed since the last step."""
        self._choice.undo()
        self._ledger.drop_all("run_ended", version=self._version, now_s=now_s)
        self._checked()
        return self._ledger.take_news()

    def take_news(self) -> News:
        """What was listed since the last step, before a checkpoint that is not a step's."""
        return self._ledger.take_news()

    def state(self) -> CoreState:
        """A checkpoint, for the turn in which a step ended and what it listed was taken; chosen batches are undone."""
        return CoreState(
            version=self._version,
            batch_size=self.settings.batch_size,
            max_staleness=self.settings.max_staleness,
            records=self._ledger.records(),
            totals=self._ledger.totals_copy(),
            lead_limit=self._lead.limit,
            max_staleness_seen=self._choice.max_staleness_seen,
        )

    @classmethod
    def from_state(
        cls,
        state: CoreState,
        *,
        settings: DecisionSettings,
        sampler: Sampler,
        restored_draw_ids: Collection[int],
        now_s: float,
        debug: bool,
    ) -> "DecisionCore":
        """Continue from a checkpoint. Nothing is served until `served` is called: a resumed trainer publishes first.

        `restored_draw_ids`: the draws of whose trajectories the caller still has all (queued) or some (in flight). The
        others are given back and re-issued, without a try charged, as are all if batch size or bound have changed.
        """
        core = cls(settings=settings, sampler=sampler, debug=debug)
        sampler.seek(state.totals.considered)
        core._version = state.version
        core._choice.max_staleness_seen = state.max_staleness_seen
        core._lead.restore(state.lead_limit)
        core._ledger.restore(state.records, state.totals)
        kept = state.going_on(settings, restored_draw_ids)
        core._ledger.interrupt(kept, version=state.version, now_s=now_s)
        core._checked()
        return core

    def check(self) -> None:
        """Raises `AssertionError` with the sentence that does not hold."""
        check_core(
            self._ledger,
            self.settings,
            version=self._version,
            served_version=self._served_version,
            chosen=self._choice.chosen,
            sampler=self._sampler,
            retry=self._retry,
            lead=self._lead,
        )

    def _checked(self) -> None:
        if self._debug:
            self.check()

    def _fail(self, record: DrawRecord, reason: str, now_s: float) -> Answer:
        answer = self._retry.fail(record, reason, version=self._version, now_s=now_s)
        self._checked()
        return answer

    def _choose(self, step: int, now_s: float) -> Chosen | Waiting:
        batch = self._choice.choose(step, version=self._version, now_s=now_s)
        self._checked()
        return batch
