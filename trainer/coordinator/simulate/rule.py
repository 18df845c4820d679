"""What the simulated world needs of a set of rules: the decision core has it, and the rules of other projects."""

from typing import Protocol

from asyppo_async.trainer.coordinator.decisions import StepReport
from asyppo_async.trainer.coordinator.draws import Answer, Draw, LedgerCounts, News, TokenCounts, TokenUse
from asyppo_async.trainer.coordinator.order import Chosen, Waiting


class Rule(Protocol):
    """Admission, order and consumption; the methods are those of `DecisionCore`, with its meanings."""

    @property
    def version(self) -> int: ...

    @property
    def finished(self) -> bool: ...

    @property
    def max_staleness_seen(self) -> int: ...

    def served(self, version: int) -> bool: ...

    def admit(self, now_s: float) -> list[Draw]: ...

    def record_tokens(self, draw: Draw, num_tokens: int) -> None: ...

    def finish(
        self,
        draw: Draw,
        *,
        num_members: int,
        num_tokens: int,
        oldest_version: int,
        newest_version: int,
        now_s: float,
    ) -> Answer: ...

    def filter(self, draw: Draw, *, reason: str, now_s: float) -> Answer: ...

    def fail(self, draw: Draw, *, reason: str, now_s: float) -> Answer: ...

    def choose_batch(self, now_s: float) -> Chosen | Waiting: ...

    def choose_ahead(self, now_s: float) -> Chosen | Waiting | None: ...

    def begin_step(self, now_s: float) -> None: ...

    def end_step(self, now_s: float, use: TokenUse) -> StepReport: ...

    def close(self, now_s: float) -> News: ...

    def counts(self) -> LedgerCounts: ...

    def token_counts(self) -> TokenCounts: ...
