"""What a simulated run comes to in numbers: time, use of both sides, staleness, waste, and bias by length."""

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from asyppo_async.trainer.coordinator.draws import Draw
from asyppo_async.trainer.coordinator.simulate.outcome import Outcome, SimStep
from asyppo_async.trainer.coordinator.simulate.scenario import Scenario

_NUM_LENGTHS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of the steps after the warm-up. Shares are of 1."""

    num_steps: int
    step_s: float
    """Mean time from the end of one step to the end of the next."""
    median_step_s: float
    trained_tokens_per_s: float
    """Tokens with weight in an update."""
    trainer_share: float
    """Of the time: the trainer trains."""
    wait_share: float
    """Of the time: the trainer waits for its batch."""
    publication_share: float
    """Of the time: the trainer waits for its publication."""
    fleet_share: float
    """Of the slots of the fleet: those that run a sequence."""
    fleet_tokens_share: float
    """Tokens generated, of those that full servers would generate."""
    mean_staleness: float
    """Over the tokens with weight."""
    worst_staleness: int
    staleness_histogram: tuple[float, ...]
    """Share of the tokens with weight, by age in versions."""
    waste: Mapping[str, float]
    """Tokens without weight by reason, as a share of all that were used up."""
    length_ratio: float
    """Mean length of trained responses over that of the data set; 1 is no bias."""

    @property
    def waste_share(self) -> float:
        return sum(self.waste.values())


def figures_of(outcome: Outcome, *, num_warm_up: int) -> Figures:
    """`num_warm_up`: first steps that are left out; at least one, for time runs from the end of the last of them."""
    before, steps = outcome.steps[num_warm_up - 1], outcome.steps[num_warm_up:]
    elapsed_s = steps[-1].ended_s - before.ended_s
    ends = [step.ended_s for step in outcome.steps[num_warm_up - 1 :]]
    seconds = [later - earlier for earlier, later in pairwise(ends)]
    scenario = outcome.scenario
    trained = sum(step.num_trained_tokens for step in steps)
    generated = steps[-1].num_generated_tokens - before.num_generated_tokens
    training_s = sum(step.ended_s - step.began_s for step in steps)
    waited_s = sum(step.waited_s for step in steps)
    ages = _ages(steps)
    weighted = sum(ages.values())
    return Figures(
        num_steps=len(steps),
        step_s=elapsed_s / len(steps),
        median_step_s=statistics.median(seconds),
        trained_tokens_per_s=trained / elapsed_s,
        trainer_share=training_s / elapsed_s,
        wait_share=waited_s / elapsed_s,
        publication_share=max(0.0, 1 - (training_s + waited_s) / elapsed_s),
        fleet_share=(steps[-1].occupied_s - before.occupied_s)
        / (elapsed_s * sum(plan.num_slots for plan in scenario.servers)),
        fleet_tokens_share=generated / elapsed_s / sum(plan.full_tokens_per_s for plan in scenario.servers),
        mean_staleness=sum(age * number for age, number in ages.items()) / max(1, weighted),
        worst_staleness=max(ages, default=0),
        staleness_histogram=tuple(ages[age] / max(1, weighted) for age in range(max(ages, default=0) + 1)),
        waste=_waste(before, steps),
        length_ratio=_length_ratio(scenario, steps),
    )


def _ages(steps: list[SimStep]) -> Counter[int]:
    """Tokens with weight by age."""
    ages: Counter[int] = Counter()
    for step in steps:
        for group in step.groups:
            for version, number in group.versions.items():
                if version >= step.token_bound:
                    ages[step.step - version] += number
    return ages


def _waste(before: SimStep, steps: list[SimStep]) -> dict[str, float]:
    used = sum(group.num_tokens for step in steps for group in step.groups)
    dropped = {
        reason: number - before.dropped_tokens.get(reason, 0)
        for reason, number in steps[-1].dropped_tokens.items()
    }
    total = max(1, used + sum(dropped.values()))
    without_weight = used - sum(step.num_trained_tokens for step in steps)
    waste = {"masked": without_weight / total} if without_weight else {}
    return waste | {reason: number / total for reason, number in dropped.items() if number}


def _length_ratio(scenario: Scenario, steps: list[SimStep]) -> float:
    groups = [group for step in steps for group in step.groups]
    trained = sum(group.num_tokens for group in groups) / sum(group.num_members for group in groups)
    return trained / mean_length(scenario)


def mean_length(scenario: Scenario) -> float:
    """Tokens of a response, over many prompts of the scenario."""
    draws = [
        Draw(
            draw_id=index,
            attempt=0,
            prompt_id=f"p{index % scenario.num_prompts}",
            epoch=0,
            admission_version=0,
        )
        for index in range(_NUM_LENGTHS)
    ]
    return statistics.fmean(scenario.length(draw, 0) for draw in draws)
