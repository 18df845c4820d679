"""What the simulated coordinator holds: attempts in flight, and its last checkpoint."""

from dataclasses import dataclass, field

from asyppo_async.trainer.coordinator.decisions import CoreState
from asyppo_async.trainer.coordinator.draws import Draw
from asyppo_async.trainer.coordinator.simulate.clock import Event
from asyppo_async.trainer.coordinator.simulate.outcome import SimGroup
from asyppo_async.trainer.coordinator.simulate.server import Sequence


@dataclass(slots=True, kw_only=True)
class Rollout:
    """An attempt in flight."""

    draw: Draw
    deadline: Event
    missing: dict[int, Sequence]
    ended: list[Sequence] = field(default_factory=list)
    num_ended_tokens: int = 0
    is_silent: bool = False
    """It is complete, and the message that says so was lost."""

    @property
    def num_tokens(self) -> int:
        return self.num_ended_tokens + sum(sequence.num_tokens for sequence in self.missing.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    core: CoreState
    groups: dict[int, SimGroup]
    num_steps: int
    num_fates: int
