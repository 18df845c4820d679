"""What the simulated coordinator holds: attempts in flight, and its last checkpoint."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from asyppo_async.trainer.coordinator.decisions import CoreState
from asyppo_async.trainer.coordinator.draws import Draw
from asyppo_async.trainer.coordinator.simulate.clock import Event
from asyppo_async.trainer.coordinator.simulate.outcome import SimGroup
from asyppo_async.trainer.coordinator.simulate.scenario import Scenario
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

    def begun(self) -> tuple[Sequence, ...]:
        """Copies of the sequences that have tokens."""
        begun = [sequence for sequence in (*self.ended, *self.missing.values()) if sequence.num_tokens]
        return tuple(replace(sequence, versions=dict(sequence.versions)) for sequence in begun)


def rollout_of(scenario: Scenario, draw: Draw, deadline: Event, begun: Iterable[Sequence]) -> Rollout:
    """An attempt that begins, or goes on from what a checkpoint has of it."""
    there = {sequence.member: replace(sequence, versions=dict(sequence.versions)) for sequence in begun}
    members = [
        there.get(member)
        or Sequence(
            draw=draw,
            member=member,
            length=scenario.length(draw, member),
            prompt_tokens=scenario.lengths.prompt_tokens,
        )
        for member in range(scenario.settings.group_size)
    ]
    ended = [sequence for sequence in members if sequence.num_tokens == sequence.length]
    return Rollout(
        draw=draw,
        deadline=deadline,
        missing={sequence.member: sequence for sequence in members if sequence not in ended},
        ended=ended,
        num_ended_tokens=sum(sequence.num_tokens for sequence in ended),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    core: CoreState
    groups: dict[int, SimGroup]
    begun: dict[int, tuple[Sequence, ...]]
    """By draw in flight."""
    num_steps: int
    num_fates: int
