"""The design's invariants 2, 3 and 7 over random worlds: every size, policy and fault, one seed each.

A failure names its seed; `ASYPPO_SEED=<seed> pytest tests/simulation/test_random_schedules.py -k quick` replays it.
"""

import os
from collections import Counter

import pytest

from asyppo_async.trainer.coordinator.simulate.audit import audit
from asyppo_async.trainer.coordinator.simulate.outcome import Outcome
from asyppo_async.trainer.coordinator.simulate.random_scenario import random_scenario
from asyppo_async.trainer.coordinator.simulate.world import World

NUM_QUICK = 2000
NUM_LONG = 30_000
CHUNK = 100
REPLAYED = os.environ.get("ASYPPO_SEED")


def seeds_of(first: int) -> list[int]:
    return [int(REPLAYED)] if REPLAYED else list(range(first, first + CHUNK))


def run_seed(seed: int) -> Outcome:
    try:
        outcome = World(random_scenario(seed), debug=True).run()
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise
    audit(outcome)
    return outcome


@pytest.mark.parametrize("first", range(0, CHUNK if REPLAYED else NUM_QUICK, CHUNK))
def test_invariants_hold_when_a_random_world_runs_to_its_end_quick(first: int) -> None:
    for seed in seeds_of(first):
        run_seed(seed)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(NUM_QUICK, NUM_LONG, CHUNK))
def test_invariants_hold_when_a_random_world_runs_to_its_end_long(first: int) -> None:
    for seed in seeds_of(first):
        run_seed(seed)


def test_random_worlds_are_hard_enough_when_counted_over_many_seeds() -> None:
    """The worlds above prove something only if what they guard against happens in them."""
    seen: Counter[str] = Counter()
    for seed in range(80):
        outcome = run_seed(seed)
        counts, tokens = outcome.counts, outcome.tokens
        assert counts is not None
        assert tokens is not None
        settings = outcome.scenario.settings
        reached = max(step.staleness for step in outcome.steps)
        seen["resumed"] += outcome.num_resumes > 0
        seen["continued"] += outcome.num_continued > 0
        seen["reduced"] += counts.reduced > 0
        seen["filtered"] += counts.filtered > 0
        seen["dropped"] += counts.dropped > 0
        seen["skipped"] += counts.skipped > 0
        seen["skipped and resumed"] += counts.skipped > 0 and outcome.num_resumes > 0
        seen["late"] += counts.late_messages > 0
        seen["stale tokens"] += tokens.stale > 0
        seen["mixed versions"] += any(
            len(group.versions) > 1 for step in outcome.steps for group in step.groups
        )
        seen["ahead"] += outcome.scenario.critic_ahead
        seen[f"bound reached, {settings.on_stale}"] += reached == settings.max_staleness > 0
        for reason in counts.returned_by_reason:
            seen[f"returned: {reason}"] += 1
    missing = [
        what
        for what in (
            "resumed",
            "continued",
            "reduced",
            "filtered",
            "dropped",
            "skipped",
            "skipped and resumed",
            "late",
            "stale tokens",
            "mixed versions",
            "ahead",
            "bound reached, wait",
            "bound reached, drop",
            "returned: interrupted",
            "returned: not_restored",
            "returned: deadline",
            "returned: failed_reward",
            "returned: too_few_members",
        )
        if seen[what] < 2
    ]
    assert not missing, f"hardly ever seen: {missing} of {dict(seen)}"
