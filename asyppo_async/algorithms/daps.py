"""DAPS: prompts are accepted for rollout by how uncertain their outcome is (S3AC). Torch-free.

    p_c = clamp((V(s_0) + 1) / 2, 0, 1)                      the critic's guess
    p   = (S + n_c p_c) / (N + n_c)                          with decayed counts of successes S and trials N
    a   = a_min + (1 - a_min) 4 p (1 - p)
    a_eff = (1 - q) + q a,   q = clamp((step - uniform_steps) / ramp_steps, 0, 1)

Beyond the paper, each off at strength 0, the constants follow the critics' disagreement s = std over critics of V(s_0).
Where they disagree a prompt is tried although it looks certain, their guess weighs less, and outcomes are forgotten
sooner:

    a_min(s) = a_min + (1 - a_min) min(1, c_floor s)
    n_c(s)   = n_c / (1 + c_prior s)
    decay(s) = decay^(1 + c_decay s)

A candidate is drawn uniformly *with replacement*, scored, and accepted with probability a_eff; the resulting
distribution is proportional to a_eff. (Training each prompt once per epoch would cancel the selection.) Every
decision is a hash of seed and draw number, so a resumed run decides alike.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from asyppo_async.algorithms.seeded import seeded_integer, seeded_uniform
from asyppo_async.errors import ConfigError
from asyppo_async.metrics import mean_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOutcomes:
    """Decayed counts of one prompt."""

    prompt_id: str
    successes: float
    trials: float


class OutcomeCounts:
    """S and N of every prompt; all decay together, once per trainer step and before new outcomes are added.

    Decay is applied when a prompt is read: a step costs nothing, whatever the number of prompts.
    """

    def __init__(self, *, decay: float, outcomes: Iterable[PromptOutcomes] = ()) -> None:
        if not 0 < decay <= 1:
            raise ValueError(f"the decay of outcome counts lies in (0, 1], got {decay}")
        self._decay = decay
        self._decays: dict[str, float] = {}
        """Of prompts that have another."""
        self._step = 0
        self._counts = {entry.prompt_id: (entry.successes, entry.trials, 0) for entry in outcomes}

    def advance(self) -> None:
        """A trainer step begins: S, N <- decay S, decay N for all prompts, seen or not."""
        self._step += 1

    def set_decay(self, prompt_id: str, decay: float) -> None:
        """From now on the counts of this prompt decay by another factor a step."""
        now = self.of(prompt_id)
        if now.trials > 0:
            self._counts[prompt_id] = (now.successes, now.trials, self._step)
        self._decays[prompt_id] = decay

    def add(self, prompt_id: str, *, successes: float, trials: float) -> None:
        """Count real outcomes (binary verdicts), also of responses that are later dropped or filtered."""
        if not 0 <= successes <= trials:
            raise ValueError(
                f"successes lie in [0, trials = {trials}], got {successes} for prompt {prompt_id!r}"
            )
        now = self.of(prompt_id)
        self._counts[prompt_id] = (now.successes + successes, now.trials + trials, self._step)

    def of(self, prompt_id: str) -> PromptOutcomes:
        """Counts of a prompt now; zeros if it was never tried."""
        successes, trials, step = self._counts.get(prompt_id, (0.0, 0.0, self._step))
        factor = self._decays.get(prompt_id, self._decay) ** (self._step - step)
        return PromptOutcomes(prompt_id=prompt_id, successes=successes * factor, trials=trials * factor)

    def copy(self) -> "OutcomeCounts":
        """As of now, whatever is counted later: quick, so that `snapshot` of it can be made elsewhere."""
        other = OutcomeCounts(decay=self._decay)
        other._step, other._counts, other._decays = self._step, self._counts.copy(), self._decays.copy()
        return other

    def snapshot(self) -> tuple[PromptOutcomes, ...]:
        """All counts as of now, for a checkpoint; `outcomes` of a new object restores them."""
        return tuple(self.of(prompt_id) for prompt_id in sorted(self._counts))


def success_of(reward: float, partial: Literal["fraction", "binary", "refuse"]) -> float:
    """What a reward counts as: s = (R + 1) / 2, or only R = 1 as a success.

    Raises:
        ConfigError: The reward is outside [-1, 1], or between its ends under `refuse`.
    """
    if not -1 <= reward <= 1:
        raise ConfigError(
            f"selection.prompts = 'daps' counts successes, and a reward is {reward:g}, outside [-1, 1]: scale its "
            "task's scores (task.data.score_range), or draw prompts otherwise"
        )
    if partial == "refuse" and -1 < reward < 1:
        raise ConfigError(
            f"selection.partial_rewards = 'refuse', and a reward is {reward:g}, neither right (1) nor wrong (-1); use "
            "'fraction' or 'binary'"
        )
    return (reward + 1) / 2 if partial == "fraction" else float(reward >= 1)


def critic_probability(start_value: float) -> float:
    """p_c from V(s_0) in [-1, 1]."""
    return min(1.0, max(0.0, (start_value + 1) / 2))


def success_estimate(start_value: float, outcomes: PromptOutcomes, *, prior_trials: float) -> float:
    """p: outcomes, with the critic's guess worth `prior_trials` (n_c) of them."""
    guess = critic_probability(start_value)
    return (outcomes.successes + prior_trials * guess) / (outcomes.trials + prior_trials)


def acceptance(success: float, *, minimum: float) -> float:
    """a, between `minimum` (a_min) for a certain outcome and 1 at p = 1/2."""
    return minimum + (1 - minimum) * 4 * success * (1 - success)


def ramp(step: int, *, uniform_steps: int, ramp_steps: int) -> float:
    """q: 0 for the first steps, then linear to 1. Steps are 0-based and in whichever unit the settings are."""
    if ramp_steps == 0:
        return float(step >= uniform_steps)
    return min(1.0, max(0.0, (step - uniform_steps) / ramp_steps))


def effective_acceptance(accepted: float, ramped: float) -> float:
    """a_eff: a mix of uniform and full selection."""
    return (1 - ramped) + ramped * accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class DapsSettings:
    """The constants of the method."""

    prior_trials: float
    """n_c (S3AC: 3)."""
    minimum_acceptance: float
    """a_min (.1 to .3)."""
    uniform_steps: int
    """(40)"""
    ramp_steps: int
    """(80)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """How strongly the critics' std about V(s_0) moves each constant; 0: not at all."""

    floor: float = 0.0
    """c_floor"""
    prior: float = 0.0
    """c_prior"""
    decay: float = 0.0
    """c_decay"""

    def settings_at(self, settings: DapsSettings, std: float) -> DapsSettings:
        """a_min(s) and n_c(s)."""
        least = settings.minimum_acceptance
        return replace(
            settings,
            minimum_acceptance=least + (1 - least) * min(1.0, self.floor * std),
            prior_trials=settings.prior_trials / (1 + self.prior * std),
        )

    def decay_at(self, decay: float, std: float) -> float:
        """decay(s)"""
        return float(decay ** (1 + self.decay * std))


@dataclass(frozen=True, slots=True, kw_only=True)
class DapsDecision:
    """What became of one candidate; a rejected one is listed as skipped."""

    draw: int
    prompt_id: str
    accepted: bool
    probability: float
    """a_eff."""
    success_estimate: float
    """p."""
    critic_probability: float
    """p_c, for its Brier score and AUC once the outcome is known."""
    trials: float
    """Decayed number of responses that the prompt had been given before."""


def draw_candidate(seed: int, draw: int, num_prompts: int) -> int:
    """Index of the prompt of a draw, uniform with replacement."""
    return seeded_integer(seed, "candidate", draw) * num_prompts >> 64


def decide(
    seed: int, draw: int, outcomes: PromptOutcomes, start_value: float, step: int, settings: DapsSettings
) -> DapsDecision:
    """Accept or skip a candidate.

    Args:
        seed: of the run.
        draw: number of the draw; decides the dice.
        outcomes: of the prompt, now.
        start_value: V(s_0), the mean over critics.
        step: 0-based, in the unit of the settings.
        settings: constants.
    """
    success = success_estimate(start_value, outcomes, prior_trials=settings.prior_trials)
    ramped = ramp(step, uniform_steps=settings.uniform_steps, ramp_steps=settings.ramp_steps)
    probability = effective_acceptance(acceptance(success, minimum=settings.minimum_acceptance), ramped)
    return DapsDecision(
        draw=draw,
        prompt_id=outcomes.prompt_id,
        accepted=seeded_uniform(seed, "accept", draw) < probability,
        probability=probability,
        success_estimate=success,
        critic_probability=critic_probability(start_value),
        trials=outcomes.trials,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DapsSummary:
    """What a set of candidates says about the selection."""

    num_candidates: int
    num_accepted: int
    mean_probability: float
    """Of a_eff over candidates; NaN without candidates."""
    success_histogram: tuple[int, ...]
    """Candidates by p, in tenths."""
    accepted_middle_share: float
    """Share of accepted candidates with .2 < p <= .8; NaN if none was accepted."""
    accepted_trials: float
    """Mean decayed number of responses that an accepted prompt had before; NaN if none was accepted."""

    @property
    def candidates_per_accepted(self) -> float:
        return self.num_candidates / self.num_accepted if self.num_accepted else float("nan")


def summarise(decisions: Sequence[DapsDecision]) -> DapsSummary:
    """Counts and means over decisions."""
    accepted = [decision for decision in decisions if decision.accepted]
    histogram = [0] * 10
    for decision in decisions:
        histogram[min(9, int(decision.success_estimate * 10))] += 1
    middle = sum(0.2 < decision.success_estimate <= 0.8 for decision in accepted)
    total = sum(decision.probability for decision in decisions)
    return DapsSummary(
        num_candidates=len(decisions),
        num_accepted=len(accepted),
        mean_probability=total / len(decisions) if decisions else float("nan"),
        success_histogram=tuple(histogram),
        accepted_middle_share=middle / len(accepted) if accepted else float("nan"),
        accepted_trials=mean_of(decision.trials for decision in accepted),
    )
