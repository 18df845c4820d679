"""A selecting sampler draws with replacement: trainings per prompt follow the acceptance weight."""

import random

from asyppo_async.trainer.coordinator.core import DecisionCore
from asyppo_async.trainer.coordinator.decisions import DecisionSettings
from asyppo_async.trainer.coordinator.draws import TokenUse
from asyppo_async.trainer.coordinator.order import Chosen
from asyppo_async.trainer.coordinator.sampler import Candidate

NUM_PROMPTS = 10
SUCCESS_RATES = [index / (NUM_PROMPTS - 1) for index in range(NUM_PROMPTS)]
LEAST_WEIGHT = 0.2
CHI_SQUARE_99_9 = 27.88
"""For 9 degrees of freedom (table)."""


def acceptance(prompt: int) -> float:
    """`algorithms.md` section 9: a_min + (1 - a_min) * 4 p (1 - p)."""
    rate = SUCCESS_RATES[prompt]
    return LEAST_WEIGHT + (1 - LEAST_WEIGHT) * 4 * rate * (1 - rate)


class AcceptingSampler:
    """Uniform candidates with replacement, accepted with the weight of their fixed success rate."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.num_prompts = NUM_PROMPTS
        self.num_considered = 0
        self.exhausted = False

    def seek(self, num_considered: int) -> None:
        self.num_considered = num_considered

    def next_candidate(self) -> Candidate:
        prompt = self._random.randrange(NUM_PROMPTS)
        epoch = self.num_considered // NUM_PROMPTS
        self.num_considered += 1
        accepted = self._random.random() < acceptance(prompt)
        return Candidate(prompt_id=str(prompt), epoch=epoch, accepted=accepted)


def trained_per_prompt(num_steps: int) -> tuple[DecisionCore, list[int]]:
    """Random finishing order under `wait`, all groups trained."""
    settings = DecisionSettings(
        batch_size=8,
        group_size=4,
        num_critics=2,
        max_staleness=2,
        on_stale="wait",
        lead="saturated",
        max_attempts=3,
        max_concurrent_groups=1000,
        max_replacements_per_step=100,
        num_steps=num_steps,
    )
    core = DecisionCore(settings=settings, sampler=AcceptingSampler(seed=3), debug=False)
    shuffled = random.Random(4)
    trained = [0] * NUM_PROMPTS
    in_flight = []
    core.served(0)
    now_s = 0.0
    while not core.finished:
        now_s += 1
        in_flight += core.admit(now_s)
        if in_flight:
            draw = in_flight.pop(shuffled.randrange(len(in_flight)))
            version = draw.admission_version
            core.finish(
                draw, num_members=4, num_tokens=4, oldest_version=version, newest_version=version, now_s=now_s
            )
        batch = core.choose_batch(now_s)
        if isinstance(batch, Chosen):
            core.begin_step(now_s)
            core.end_step(now_s, TokenUse(trained=batch.num_tokens, stale=0, rejected=0))
            core.served(core.version)
            for chosen in batch.draws:
                trained[int(chosen.draw.prompt_id)] += 1
    return core, trained


def chi_square(observed: list[int], weights: list[float]) -> float:
    expected = [sum(observed) * weight / sum(weights) for weight in weights]
    return sum((count - mean) ** 2 / mean for count, mean in zip(observed, expected, strict=True))


def test_trainings_when_a_sampler_selects_follow_its_weights() -> None:
    core, trained = trained_per_prompt(num_steps=500)
    assert sum(trained) == 4000
    assert chi_square(trained, [acceptance(prompt) for prompt in range(NUM_PROMPTS)]) < CHI_SQUARE_99_9
    assert chi_square(trained, [1.0] * NUM_PROMPTS) > 10 * CHI_SQUARE_99_9
    counts = core.counts()
    assert counts.considered == counts.issued + counts.skipped
    assert abs(counts.issued / counts.considered - sum(map(acceptance, range(NUM_PROMPTS))) / 10) < 0.03
