"""GRESO (2506.02177): a prompt whose last groups were all right or all wrong is skipped with growing
probability.

    skip probability 1 - max(p^z, explore_floor),   z = length of the prompt's current run of such groups

p is kept apart for easy (all right) and hard (all wrong) prompts, and moved after each batch towards a target
share of such groups. Torch-free.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from asyppo_async.algorithms.seeded import seeded_uniform

ZeroVariance = Literal["easy", "hard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRun:
    """A prompt's current run of groups without variance, all of one kind."""

    prompt_id: str
    kind: ZeroVariance
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GresoSettings:
    """The constants of the method."""

    explore_floor: float
    """Smallest probability of *not* skipping (.01)."""
    target_easy: float
    """Share of easy groups aimed at (.25 / 3)."""
    target_hard: float
    """(.5 / 3)"""
    probability_step: float
    """(.01)"""
    probability_min: float
    """(.05)"""
    probability_max: float
    """(.95)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GresoProbabilities:
    """The base p of each kind (both start at .5)."""

    easy: float
    hard: float


def skip_probability(base: float, run_length: int, *, explore_floor: float) -> float:
    """1 - max(p^z, floor); 0 for a prompt without a run."""
    return 1.0 - max(base**run_length, explore_floor)


def adapt(base: float, observed_share: float, target: float, settings: GresoSettings) -> float:
    """p down a step (skip more) if the share is at least the target, else up, within its limits."""
    step = settings.probability_step
    moved = base - step if observed_share >= target else base + step
    return min(settings.probability_max, max(settings.probability_min, moved))


def adaptive_candidates(
    missing_responses: int,
    zero_variance_share: float,
    *,
    responses_per_prompt: int,
    safety: float,
    minimum: int,
    default: int,
) -> int:
    """Prompts to sample next: int(missing / (1 - share) / K * safety), within [minimum, default].

    Args:
        missing_responses: until the training batch is full.
        zero_variance_share: of the groups so far.
        responses_per_prompt: K.
        safety: (1.25)
        minimum: (64)
        default: the usual sampling batch (384); never exceeded.
    """
    if zero_variance_share >= 1:
        return default
    wanted = int(missing_responses / (1 - zero_variance_share) / responses_per_prompt * safety)
    return min(default, max(minimum, wanted))


class Greso:
    """Runs of all prompts and the two base probabilities."""

    def __init__(
        self,
        settings: GresoSettings,
        probabilities: GresoProbabilities,
        runs: Iterable[PromptRun] = (),
    ) -> None:
        self._settings = settings
        self._probabilities = probabilities
        self._runs = {run.prompt_id: run for run in runs}

    @property
    def probabilities(self) -> GresoProbabilities:
        return self._probabilities

    def skip_probability(self, prompt_id: str) -> float:
        """Of a prompt now."""
        run = self._runs.get(prompt_id)
        if run is None:
            return 0.0
        base = self._probabilities.easy if run.kind == "easy" else self._probabilities.hard
        return skip_probability(base, run.length, explore_floor=self._settings.explore_floor)

    def skips(self, prompt_id: str, *, seed: int, draw: int) -> bool:
        """The decision of one draw."""
        return seeded_uniform(seed, "greso", draw) < self.skip_probability(prompt_id)

    def record(self, prompt_id: str, *, num_correct: int, group_size: int) -> None:
        """A group came back: it continues, starts or ends the prompt's run."""
        if 0 < num_correct < group_size:
            self._runs.pop(prompt_id, None)
            return
        kind: ZeroVariance = "easy" if num_correct == group_size else "hard"
        run = self._runs.get(prompt_id)
        length = run.length + 1 if run is not None and run.kind == kind else 1
        self._runs[prompt_id] = PromptRun(prompt_id=prompt_id, kind=kind, length=length)

    def end_batch(self, *, easy_share: float, hard_share: float, epoch: int) -> None:
        """Move both probabilities after a training batch; not in epoch 0, where nothing is skipped yet."""
        if epoch == 0:
            return
        self._probabilities = GresoProbabilities(
            easy=adapt(self._probabilities.easy, easy_share, self._settings.target_easy, self._settings),
            hard=adapt(self._probabilities.hard, hard_share, self._settings.target_hard, self._settings),
        )

    def copy(self) -> "Greso":
        """As of now, whatever is recorded later."""
        return Greso(self._settings, self._probabilities, self._runs.values())

    def snapshot(self) -> tuple[PromptRun, ...]:
        return tuple(self._runs[prompt_id] for prompt_id in sorted(self._runs))
