"""The rules of other projects in our world: each keeps the books, and shows what its own sources promise or lack."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from asyppo_async.trainer.coordinator.decisions import DecisionSettings, OnStale
from asyppo_async.trainer.coordinator.simulate.audit import audit, audit_accounts
from asyppo_async.trainer.coordinator.simulate.figures import Figures, figures_of
from asyppo_async.trainer.coordinator.simulate.outcome import Outcome
from asyppo_async.trainer.coordinator.simulate.rival_rule import RivalRule
from asyppo_async.trainer.coordinator.simulate.rival_rules import (
    AReaLRule,
    PipelineRingRule,
    PipelineRule,
    PrimeRule,
    VerlAsyncRule,
    VerlV1Rule,
)
from asyppo_async.trainer.coordinator.simulate.scenario import LengthPlan, Scenario, ServerPlan, sampler_of
from asyppo_async.trainer.coordinator.simulate.world import World

ETA = 2
NUM_STEPS = 80
NUM_WARM_UP = 10

MakeRule = Callable[..., RivalRule]


def scenario_of(on_stale: OnStale = "wait", prompt_sigma: float = 1.2) -> Scenario:
    """Two servers that make a batch in 6 s, a trainer step of 10 s, and responses that last from 1 to 200 s."""
    settings = DecisionSettings(
        batch_size=8,
        group_size=2,
        num_critics=2,
        max_staleness=ETA,
        on_stale=on_stale,
        lead="saturated",
        max_attempts=3,
        max_concurrent_groups=48,
        max_replacements_per_step=1000,
        num_steps=NUM_STEPS,
    )
    return Scenario(
        seed=5,
        settings=settings,
        num_prompts=2000,
        num_epochs=None,
        least_acceptance=1.0,
        servers=(
            ServerPlan(num_slots=32, base_s=0.05, per_sequence_s=0.0, prefill_s_per_token=0.0, joins_s=0.0),
        )
        * 2,
        lengths=LengthPlan(
            median_tokens=100, prompt_sigma=prompt_sigma, member_sigma=0.2, max_tokens=4000, prompt_tokens=0
        ),
        step_s=10.0,
        step_s_per_token=0.0,
        skipped_fraction=0.0,
        critic_ahead=False,
        publication_s=0.5,
        pause_s=0.1,
        weights="staged",
        publication_blocks_trainer=True,
        kv_on_update="keep",
        members_apart=False,
        failed_publication_fraction=0.0,
        filtered_fraction=0.0,
        failed_reward_fraction=0.0,
        doomed_fraction=0.0,
        lost_fraction=0.0,
        duplicated_fraction=0.0,
        deadline_s=1e6,
        faults=(),
        checkpoint_every_steps=1000,
        restores_queue=True,
    )


def run(make: MakeRule | None, scenario: Scenario) -> tuple[Outcome, Figures]:
    rule = None if make is None else make(settings=scenario.settings, sampler=sampler_of(scenario))
    outcome = World(scenario, debug=make is None, rule=rule).run()
    if make is None:
        audit(outcome)
    else:
        audit_accounts(outcome)
    assert len(outcome.steps) == NUM_STEPS
    return outcome, figures_of(outcome, num_warm_up=NUM_WARM_UP)


@pytest.mark.parametrize("make", [AReaLRule, VerlAsyncRule, PipelineRule, PipelineRingRule])
def test_rule_when_only_admission_is_gated_passes_the_bound_and_wastes_nothing(make: MakeRule) -> None:
    _, figures = run(make, scenario_of())
    assert figures.worst_staleness > 2 * ETA
    assert figures.length_ratio == pytest.approx(1.0, abs=0.12)


@pytest.mark.parametrize(("make", "on_stale"), [(PrimeRule, "drop"), (VerlV1Rule, "drop")])
def test_rule_when_old_groups_are_dropped_keeps_the_bound_and_trains_short_answers(
    make: MakeRule, on_stale: OnStale
) -> None:
    _, figures = run(make, scenario_of(on_stale))
    assert figures.worst_staleness <= ETA
    assert figures.waste_share > 0.2
    assert figures.length_ratio < 0.85


def test_ours_when_it_waits_keeps_the_bound_and_wastes_nothing() -> None:
    _, figures = run(None, scenario_of())
    assert figures.worst_staleness == ETA
    assert figures.waste_share == 0.0
    assert figures.length_ratio == pytest.approx(1.0, abs=0.12)


def test_ours_when_it_drops_wastes_less_than_the_rules_that_cancel() -> None:
    """Same bound: a due group is waited for by nobody, but younger ones are not dropped with it."""
    _, ours = run(None, scenario_of("drop"))
    _, prime = run(PrimeRule, scenario_of("drop"))
    assert ours.worst_staleness <= ETA
    assert ours.length_ratio > prime.length_ratio


@pytest.mark.parametrize("make", [AReaLRule, PrimeRule, VerlAsyncRule, VerlV1Rule, PipelineRule])
def test_rule_when_nothing_is_slow_trains_everything_within_the_bound(make: MakeRule) -> None:
    scenario = scenario_of(prompt_sigma=0.0)
    # prime-rl keeps the engines full whatever the trainer needs, so here they hold one batch only.
    settings = replace(scenario.settings, max_concurrent_groups=8 if make is PrimeRule else 24)
    outcome, figures = run(make, replace(scenario, settings=settings))
    assert figures.waste_share < 0.1
    assert figures.worst_staleness <= ETA
    assert outcome.counts is not None
    assert outcome.counts.trained == NUM_STEPS * 8


def test_ring_buffer_when_the_trainer_is_slower_throws_away_what_it_cannot_use() -> None:
    _, figures = run(PipelineRingRule, scenario_of(prompt_sigma=0.0))
    assert figures.waste["ring_full"] > 0.5


@pytest.mark.parametrize("make", [AReaLRule, PipelineRule])
def test_capacity_when_a_version_is_served_is_that_of_the_published_formula(make: MakeRule) -> None:
    """(eta + v + 1) B groups over the run: 24 at version 0, 32 at version 1."""
    scenario = scenario_of()
    settings = replace(scenario.settings, max_concurrent_groups=1000)
    rule = make(settings=settings, sampler=sampler_of(scenario))
    assert rule.admit(0.0) == []
    rule.served(0)
    draws = rule.admit(0.0)
    assert len(draws) == 24
    for draw in draws[:8]:
        rule.finish(draw, num_members=2, num_tokens=2, oldest_version=0, newest_version=0, now_s=1.0)
    assert rule.admit(1.0) == []
    assert rule.choose_batch(1.0).step == 0
    assert rule.admit(1.0) == []
