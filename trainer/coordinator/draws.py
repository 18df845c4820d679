"""The values that the decision core speaks in: draws, fates, counts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from asyppo_async.trainer.coordinator.sampler import Candidate

DrawState = Literal["in_flight", "queued", "chosen", "returned"]
Answer = Literal["queued", "filtered", "returned", "dropped", "late"]
"""What a message about a draw did: `returned` means that `admit` gives out another attempt, `late` nothing."""

Outcome = Literal["trained", "filtered", "dropped", "returned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One attempt at one draw of a prompt: what the event loop turns into a rollout."""

    draw_id: int
    attempt: int
    """Grows with every re-issue; a message about an older attempt changes nothing."""
    prompt_id: str
    epoch: int
    admission_version: int
    """The served version of the moment of admission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """What is known of a group when all its responses are there and rewarded."""

    num_members: int
    num_tokens: int
    """Of the members that are left."""
    oldest_version: int
    newest_version: int


@dataclass(slots=True, kw_only=True)
class DrawRecord:
    """What the ledger knows of a live draw. Only the ledger writes it."""

    draw_id: int
    prompt_id: str
    epoch: int
    state: DrawState
    attempt: int
    num_failures: int
    admission_version: int
    admitted_s: float
    server: str = ""
    """Where the attempt was sent last; empty: nowhere yet, or to several."""
    num_tokens: int = 0
    num_members: int = 0
    oldest_version: int = -1
    newest_version: int = -1
    finished_s: float = 0.0
    finished_at_version: int = -1
    """Trainer version when the group was queued: it splits staleness into time in flight and time in the queue."""
    finish_order: int = -1
    step: int = -1
    """The step that the group was chosen for."""

    @property
    def draw(self) -> Draw:
        return Draw(
            draw_id=self.draw_id,
            attempt=self.attempt,
            prompt_id=self.prompt_id,
            epoch=self.epoch,
            admission_version=self.admission_version,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """How one attempt ended. `returned` ends the attempt only: the draw gets another one."""

    draw: Draw
    outcome: Outcome
    reason: str
    """Empty for `trained`."""
    step: int
    """The step that trained it, else the trainer's version of that moment."""
    num_tokens: int
    at_s: float


def fate_of(record: DrawRecord, outcome: Outcome, reason: str, *, step: int, at_s: float) -> Fate:
    """The end of an attempt as its record stands now."""
    return Fate(
        draw=record.draw, outcome=outcome, reason=reason, step=step, num_tokens=record.num_tokens, at_s=at_s
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Consideration:
    """A candidate as the ledger lists it."""

    candidate: Candidate
    draw_id: int | None
    """The draw that it became; None: it was skipped."""
    version: int
    """Served at that moment."""
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What was listed since it was last asked for: row by row, for the run folder. The counts stay in the ledger."""

    considered: tuple[Consideration, ...]
    """In the order of their numbers."""
    fates: tuple[Fate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUse:
    """What became of the tokens of one step's batch (classes of `algorithms.md` 0.3)."""

    trained: int
    stale: int
    rejected: int

    @property
    def total(self) -> int:
        return self.trained + self.stale + self.rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """Draws, by where they are."""

    considered: int
    """Candidates that the sampler looked at: skipped + issued."""
    skipped: int
    issued: int
    in_flight: int
    queued: int
    """Finished and waiting for their step, or inside it."""
    returned: int
    """Given back and waiting for their next attempt."""
    trained: int
    filtered: int
    dropped: int
    reduced: int
    """Of the groups that were queued: those that had lost members."""
    late_messages: int
    """Messages about attempts that had ended, or sent twice."""
    filtered_by_reason: Mapping[str, int]
    dropped_by_reason: Mapping[str, int]
    returned_by_reason: Mapping[str, int]
    """Attempts that were given back since the start; such a draw may have been trained since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """The waste ledger: generated = in flight + queued + trained + stale + rejected + filtered + dropped by reason."""

    generated: int
    in_flight: int
    queued: int
    trained: int
    stale: int
    rejected: int
    filtered: int
    dropped_by_reason: Mapping[str, int]
    """Of whole attempts and, as `lost_member`, of single members."""


@dataclass(slots=True, kw_only=True)
class Totals:
    """What has ended, in numbers: with the live records, all that a checkpoint keeps. Only the ledger writes it."""

    skipped: int = 0
    issued: int = 0
    trained: int = 0
    reduced: int = 0
    late_messages: int = 0
    num_finished: int = 0
    tokens_generated: int = 0
    tokens_trained: int = 0
    tokens_stale: int = 0
    tokens_rejected: int = 0
    tokens_filtered: int = 0
    filtered_by_reason: dict[str, int] = field(default_factory=dict)
    dropped_by_reason: dict[str, int] = field(default_factory=dict)
    returned_by_reason: dict[str, int] = field(default_factory=dict)
    tokens_dropped_by_reason: dict[str, int] = field(default_factory=dict)

    @property
    def considered(self) -> int:
        """Candidates so far: where the sampler stands."""
        return self.skipped + self.issued

    @property
    def num_fates(self) -> int:
        """Attempts that have ended: rows that were listed of them."""
        by_reason = (self.filtered_by_reason, self.dropped_by_reason, self.returned_by_reason)
        return self.trained + sum(sum(counts.values()) for counts in by_reason)
