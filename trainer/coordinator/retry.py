"""Retry: a lost attempt gets another one while attempts remain, and a run in which nothing survives ends."""

from collections import Counter
from typing import Literal

from asyppo_async.errors import Stalled
from asyppo_async.trainer.coordinator.decisions import DecisionSettings
from asyppo_async.trainer.coordinator.draws import DrawRecord
from asyppo_async.trainer.coordinator.ledger import Ledger


class Retry:
    """Counts failures per draw, and filtered or dropped draws between two batches.

    Invariants: a draw fails at most `max_attempts` times; once `max_replacements_per_step` draws were filtered or
    dropped between two batches nothing is admitted until a batch is there (`exhausted` leaves admission no room).
    """

    def __init__(self, *, ledger: Ledger, settings: DecisionSettings) -> None:
        self._ledger = ledger
        self._max_attempts = settings.max_attempts
        self._max_replacements = settings.max_replacements_per_step
        self._given_up: Counter[str] = Counter()

    @property
    def exhausted(self) -> bool:
        """Whether nothing may be admitted before the next batch."""
        return self._given_up.total() >= self._max_replacements

    def check(self) -> None:
        """Raises `AssertionError` with the sentence that does not hold."""
        for record in self._ledger.live.values():
            assert record.num_failures < self._max_attempts, (
                f"a draw that failed {self._max_attempts} times has ended: {record}"
            )

    def fail(
        self, record: DrawRecord, reason: str, *, version: int, now_s: float
    ) -> Literal["returned", "dropped"]:
        """End this attempt for `reason`."""
        record.num_failures += 1
        if record.num_failures < self._max_attempts:
            self._ledger.give_back(record, reason, version=version, now_s=now_s)
            return "returned"
        self._ledger.drop(record, reason, version=version, now_s=now_s)
        self.give_up(reason)
        return "dropped"

    def give_up(self, reason: str) -> None:
        """A draw was filtered or dropped, and will be replaced."""
        self._given_up[reason] += 1

    def batch_chosen(self) -> None:
        """Start counting anew."""
        self._given_up.clear()

    def raise_if_hopeless(self, step: int) -> None:
        """Called when a batch is wanted and finished groups are missing.

        Raises:
            Stalled: nothing is in flight and no more replacements are allowed.
        """
        if self.exhausted and self._ledger.num_in_flight == 0:
            causes = ", ".join(f"{reason} {count}" for reason, count in self._given_up.most_common())
            raise Stalled(
                f"step {step} cannot be filled: {self._given_up.total()} groups in a row were filtered or dropped "
                f"({causes}); check the reward and the difficulty of the prompts, or raise max_replacements_per_step"
            )
