"""`lead = auto` against `saturated`: younger data where the trainer is the slower side, no time lost elsewhere."""

import pytest

from asyppo_async.trainer.coordinator.decisions import DecisionSettings, Lead
from asyppo_async.trainer.coordinator.simulate.audit import audit
from asyppo_async.trainer.coordinator.simulate.outcome import Outcome
from asyppo_async.trainer.coordinator.simulate.scenario import LengthPlan, Scenario, ServerPlan
from asyppo_async.trainer.coordinator.simulate.world import World

STEP_S = 10.0
BATCH_SIZE = 16
MAX_STALENESS = 4


def run(lead: Lead, generation_over_training: float) -> Outcome:
    """100 steps; one wave of responses of mean length takes `generation_over_training` steps' time."""
    settings = DecisionSettings(
        batch_size=BATCH_SIZE,
        group_size=4,
        num_critics=2,
        max_staleness=MAX_STALENESS,
        on_stale="wait",
        lead=lead,
        max_attempts=3,
        max_concurrent_groups=1000,
        max_replacements_per_step=1000,
        num_steps=100,
    )
    mean_tokens = 130
    plan = ServerPlan(
        num_slots=32,
        base_s=STEP_S * generation_over_training / mean_tokens,
        per_sequence_s=0.0,
        prefill_s_per_token=0.0,
        joins_s=0.0,
    )
    scenario = Scenario(
        seed=1,
        settings=settings,
        num_prompts=5000,
        num_epochs=None,
        least_acceptance=1.0,
        servers=(plan, plan),
        lengths=LengthPlan(
            median_tokens=100, prompt_sigma=0.7, member_sigma=0.2, max_tokens=2000, prompt_tokens=0
        ),
        step_s=STEP_S,
        step_s_per_token=0.0,
        skipped_fraction=0.0,
        critic_ahead=False,
        publication_s=1.0,
        pause_s=0.1,
        weights="staged",
        publication_blocks_trainer=False,
        kv_on_update="keep",
        members_apart=True,
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
    outcome = World(scenario, debug=False).run()
    audit(outcome)
    return outcome


def test_lead_when_the_trainer_is_slower_keeps_data_young_and_the_trainer_busy() -> None:
    saturated, auto = run("saturated", 0.2), run("auto", 0.2)
    assert saturated.mean_staleness > 3.8
    assert auto.mean_staleness < 2.0
    assert auto.wait_fraction < 0.02
    assert auto.duration_s < 1.01 * saturated.duration_s


@pytest.mark.parametrize("generation_over_training", [0.5, 1.0, 2.0])
def test_lead_when_generation_is_slower_costs_no_time(generation_over_training: float) -> None:
    saturated, auto = run("saturated", generation_over_training), run("auto", generation_over_training)
    assert auto.duration_s < 1.02 * saturated.duration_s
    assert auto.mean_staleness <= saturated.mean_staleness
