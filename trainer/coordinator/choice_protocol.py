"""What every choice among prompts answers, keeps and counts, and the verdict on a group."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from asyppo_async.algorithms.daps import PromptOutcomes
from asyppo_async.algorithms.dynamic_sampling import judge_group
from asyppo_async.algorithms.greso import GresoProbabilities, PromptRun
from asyppo_async.metrics import Metrics
from asyppo_async.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Considered:
    """What a choice says about one candidate."""

    accepted: bool
    acceptance: float
    """a: how likely it was to be accepted."""
    success_estimate: float | None
    """p: how likely a response to it is right; None: the method does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceState:
    """What a checkpoint keeps of a choice; each kind of choice uses its own part."""

    outcomes: tuple[PromptOutcomes, ...] = ()
    step: int = 0
    block: int = -1
    taken: tuple[int, ...] = ()
    runs: tuple[PromptRun, ...] = ()
    probabilities: GresoProbabilities | None = None
    verdicts: dict[str, int] = field(default_factory=dict)
    epoch: int = 0
    stds: dict[str, float] = field(default_factory=dict)


class Choice(Protocol):
    """What a selecting sampler asks about the candidate of a given number."""

    num_scored: int
    """Candidates ahead whose V(s_0) the choice wants to know."""

    def consider(self, number: int, prompt_id: str) -> Considered: ...

    def note_stds(self, stds: Mapping[str, float]) -> None:
        """The critics' standard deviation of V(s_0) of prompts, as of now."""
        ...

    def record(self, group: Group) -> None:
        """A group came back with its verdicts."""
        ...

    def end_step(self, optimizer_steps: int) -> None:
        """A training step has ended."""
        ...

    def metrics(self) -> Metrics:
        """What was decided since the last call."""
        ...

    def frozen(self) -> "Choice":
        """As of now, whatever happens later: quick, so that `state` of it can be made elsewhere."""
        ...

    def state(self) -> ChoiceState: ...

    def restore(self, state: ChoiceState) -> None: ...


class CandidateOf(Protocol):
    """The prompt of the candidate of a number."""

    def __call__(self, number: int) -> str: ...


def num_correct(group: Group) -> int:
    """Right answers by the binary verdict, not by a shaped reward."""
    return sum(trajectory.reward >= 1 for trajectory in group.trajectories)


def teaches_nothing(group: Group) -> str | None:
    """`all_right` or `all_wrong`, or None for a group whose responses differ."""
    verdict = judge_group(num_correct(group), len(group.trajectories))
    return None if verdict == "kept" else verdict
