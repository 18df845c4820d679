"""Field reports about staleness, queue and groups, each tried in a simulated world."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from asyppo_async.errors import Stalled
from asyppo_async.trainer.coordinator.decisions import DecisionSettings, OnStale
from asyppo_async.trainer.coordinator.draws import Draw
from asyppo_async.trainer.coordinator.sampler import EpochSampler
from asyppo_async.trainer.coordinator.simulate.audit import audit
from asyppo_async.trainer.coordinator.simulate.outcome import Outcome
from asyppo_async.trainer.coordinator.simulate.scenario import Fault, LengthPlan, Scenario, ServerPlan
from asyppo_async.trainer.coordinator.simulate.world import World


def settings_of(**changes: object) -> DecisionSettings:
    settings = DecisionSettings(
        batch_size=4,
        group_size=4,
        num_critics=2,
        max_staleness=2,
        on_stale="wait",
        lead="saturated",
        max_attempts=3,
        max_concurrent_groups=64,
        max_replacements_per_step=1000,
        num_steps=20,
    )
    return replace(settings, **changes)


def scenario_of(settings: DecisionSettings, **changes: object) -> Scenario:
    """Two servers, a trainer step of 10 s, responses of 5 s in the median with a heavy tail; nothing fails."""
    scenario = Scenario(
        seed=1,
        settings=settings,
        num_prompts=400,
        num_epochs=None,
        least_acceptance=1.0,
        servers=(
            ServerPlan(num_slots=32, base_s=0.05, per_sequence_s=0.0, prefill_s_per_token=0.0, joins_s=0.0),
        )
        * 2,
        lengths=LengthPlan(
            median_tokens=100, prompt_sigma=1.0, member_sigma=0.2, max_tokens=20_000, prompt_tokens=0
        ),
        step_s=10.0,
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
        checkpoint_every_steps=1,
        restores_queue=True,
    )
    return replace(scenario, **changes)


def run(scenario: Scenario) -> Outcome:
    outcome = World(scenario, debug=True).run()
    audit(outcome)
    return outcome


def mean_length(scenario: Scenario, outcome: Outcome) -> float:
    """Tokens of a trained response."""
    groups = [group for step in outcome.steps for group in step.groups]
    return sum(group.num_tokens for group in groups) / sum(group.num_members for group in groups)


@pytest.mark.report("P37")
@hypothesis_settings(max_examples=60, deadline=None, derandomize=True)
@given(
    max_staleness=st.integers(0, 16),
    batch_size=st.integers(1, 9),
    num_servers=st.integers(1, 5),
    num_slots=st.integers(1, 5),
    max_concurrent_groups=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_run_when_limits_are_of_any_size_neither_stalls_nor_passes_the_bound(
    max_staleness: int,
    batch_size: int,
    num_servers: int,
    num_slots: int,
    max_concurrent_groups: int,
    seed: int,
) -> None:
    settings = settings_of(
        batch_size=batch_size,
        max_staleness=max_staleness,
        max_concurrent_groups=max_concurrent_groups,
        num_steps=6,
    )
    plan = ServerPlan(
        num_slots=num_slots, base_s=0.05, per_sequence_s=0.0, prefill_s_per_token=0.0, joins_s=0.0
    )
    run(scenario_of(settings, servers=(plan,) * num_servers, seed=seed))


@pytest.mark.report("P37")
@pytest.mark.parametrize("on_stale", ["wait", "mask", "drop"])
@pytest.mark.parametrize("lead", ["saturated", "auto"])
def test_run_when_max_staleness_is_0_trains_what_a_synchronous_loop_trains(
    on_stale: OnStale, lead: str
) -> None:
    settings = settings_of(max_staleness=0, on_stale=on_stale, lead=lead, num_steps=25)
    scenario = scenario_of(settings, num_prompts=30, publication_blocks_trainer=True)
    outcome = run(scenario)
    prompts = EpochSampler(
        prompt_ids=[f"p{index}" for index in range(30)], seed=scenario.seed, num_epochs=None
    )
    for step in outcome.steps:
        # The scripted engine of a synchronous loop: the lengths of a draw's members, all sampled from this version.
        synchronous: Counter[tuple[str, int, int]] = Counter()
        for index in range(settings.batch_size):
            draw = Draw(
                draw_id=step.step * settings.batch_size + index,
                attempt=0,
                prompt_id=prompts.next_candidate().prompt_id,
                epoch=step.step * settings.batch_size // 30,
                admission_version=step.step,
            )
            num_tokens = sum(scenario.length(draw, member) for member in range(settings.group_size))
            synchronous[draw.prompt_id, step.step, num_tokens] += 1
        assert synchronous == Counter(
            (group.draw.prompt_id, version, number)
            for group in step.groups
            for version, number in group.versions.items()
        )
    assert outcome.counts is not None
    assert outcome.counts.issued == 25 * settings.batch_size


@pytest.mark.report("P38")
@pytest.mark.parametrize("on_stale", ["wait", "mask", "drop"])
def test_age_when_batches_are_chosen_a_step_ahead_is_that_of_the_step_that_trains(on_stale: OnStale) -> None:
    """The critics train ahead; the bound holds at the actor's step, which is later by one version."""
    settings = settings_of(on_stale=on_stale, max_staleness=2)
    world = World(scenario_of(settings, critic_ahead=True), debug=True)
    outcome = world.run()
    audit(outcome)
    seen = [step.staleness for step in outcome.steps]
    assert world.rule.max_staleness_seen == max(seen)
    assert max(seen) >= 1
    for step in outcome.steps:
        stale = sum(
            number for group in step.groups for v, number in group.versions.items() if v < step.step - 2
        )
        total = sum(group.num_tokens for group in step.groups)
        assert step.num_trained_tokens == total - stale


@pytest.mark.report("P39")
def test_lengths_when_waited_for_are_those_of_the_data_set() -> None:
    settings = settings_of(num_steps=None, batch_size=8)
    scenario = scenario_of(settings, num_epochs=1)
    outcome = run(scenario)
    trained = Counter(group.draw.prompt_id for step in outcome.steps for group in step.groups)
    assert trained == Counter({f"p{index}": 1 for index in range(400)})
    lengths = sorted(group.num_tokens for step in outcome.steps for group in step.groups)
    asked = sorted(
        sum(scenario.length(group.draw, member) for member in range(4))
        for step in outcome.steps
        for group in step.groups
    )
    assert lengths == asked
    assert outcome.tokens is not None
    assert outcome.tokens.trained == outcome.tokens.generated


@pytest.mark.report("P39")
def test_lengths_when_stale_groups_are_dropped_shift_and_the_waste_is_reported() -> None:
    lengths = LengthPlan(
        median_tokens=100, prompt_sigma=1.5, member_sigma=0.2, max_tokens=20_000, prompt_tokens=0
    )
    waited = run(scenario_of(settings_of(num_steps=60), lengths=lengths))
    dropped = run(scenario_of(settings_of(num_steps=60, on_stale="drop"), lengths=lengths))
    assert dropped.counts is not None
    assert dropped.tokens is not None
    assert dropped.counts.returned_by_reason["stale"] >= 5
    wasted = dropped.tokens.dropped_by_reason["stale"] / dropped.tokens.generated
    assert 0.1 < wasted < 0.9
    assert mean_length(dropped.scenario, dropped) < 0.9 * mean_length(waited.scenario, waited)
    assert dropped.duration_s < waited.duration_s


@pytest.mark.report("P39")
def test_slow_prompts_when_others_overtake_them_are_trained_within_the_bound() -> None:
    """Starvation: the slowest draws are passed by many younger ones, and are still trained in time, every one."""
    lengths = LengthPlan(
        median_tokens=100, prompt_sigma=1.5, member_sigma=0.2, max_tokens=20_000, prompt_tokens=0
    )
    outcome = run(scenario_of(settings_of(num_steps=80, max_staleness=4), lengths=lengths))
    trained_at = {group.draw.draw_id: step.step for step in outcome.steps for group in step.groups}
    assert outcome.counts is not None
    assert set(trained_at) == set(range(outcome.counts.issued))
    overtaken = [
        sum(
            trained_at[younger] < trained_at[draw]
            for younger in range(draw + 1, draw + 40)
            if younger in trained_at
        )
        for draw in sorted(trained_at)
    ]
    assert max(overtaken) > 2 * 4
    assert max(step.staleness for step in outcome.steps) == 4


@pytest.mark.report("P40")
def test_prompt_when_it_always_outlives_the_bound_is_retired_after_its_tries() -> None:
    """Responses of the slowest prompts last longer than (eta + 1) steps on every attempt."""
    lengths = LengthPlan(
        median_tokens=60, prompt_sigma=1.6, member_sigma=0.0, max_tokens=20_000, prompt_tokens=0
    )
    settings = settings_of(on_stale="drop", max_staleness=1, max_attempts=2, num_steps=120)
    outcome = run(scenario_of(settings, lengths=lengths))
    assert outcome.counts is not None
    retired = [fate for fate in outcome.fates if (fate.outcome, fate.reason) == ("dropped", "stale")]
    assert len(retired) == outcome.counts.dropped_by_reason["stale"] >= 3
    for fate in retired:
        history = [other.outcome for other in outcome.fates if other.draw.draw_id == fate.draw.draw_id]
        assert history == ["returned", "dropped"]


@pytest.mark.report("P40")
def test_group_when_members_are_lost_ends_complete_or_reduced_or_dropped() -> None:
    settings = settings_of(num_steps=60)
    outcome = run(scenario_of(settings, failed_reward_fraction=0.25))
    counts = outcome.counts
    assert counts is not None
    sizes = Counter(group.num_members for step in outcome.steps for group in step.groups)
    assert set(sizes) == {2, 3, 4}
    assert counts.reduced == sizes[2] + sizes[3]
    assert counts.returned_by_reason["too_few_members"] > 0
    assert counts.issued == counts.trained + counts.dropped


@pytest.mark.report("P41")
def test_step_when_one_member_never_returns_proceeds_at_the_deadline() -> None:
    """A server stands still for ever with members of several groups on it."""
    frozen = Fault(kind="freeze", at_s=12.0, duration_s=1e9, server=1)
    settings = settings_of(num_steps=10, max_attempts=8)
    crash = Fault(kind="crash", at_s=300.0, duration_s=1e9, server=1)
    outcome = run(scenario_of(settings, faults=(frozen, crash), deadline_s=60.0))
    assert outcome.counts is not None
    assert outcome.counts.reduced > 0
    assert outcome.duration_s < 1000.0


@pytest.mark.report("P41")
def test_resume_when_a_member_hung_before_the_crash_does_not_hang_again() -> None:
    """The coordinator is killed while groups hang; those draws go on with what had come of them, and are trained."""
    frozen = Fault(kind="freeze", at_s=12.0, duration_s=1e9, server=1)
    crash = Fault(kind="crash", at_s=40.0, duration_s=1e9, server=1)
    kill = Fault(kind="kill_coordinator", at_s=50.0, duration_s=0.0, server=0)
    outcome = run(scenario_of(settings_of(num_steps=10), faults=(frozen, crash, kill)))
    assert outcome.num_resumes == 1
    assert outcome.counts is not None
    assert outcome.num_continued > 0
    assert outcome.counts.trained == outcome.counts.issued == 40


@pytest.mark.report("P45")
def test_batch_when_every_group_is_filtered_ends_with_an_error_that_names_the_cause() -> None:
    settings = settings_of(max_replacements_per_step=30)
    world = World(scenario_of(settings, filtered_fraction=1.0), debug=True)
    with pytest.raises(Stalled, match=r"step 0 cannot be filled.*equal_rewards \d+"):
        world.run()
    assert 30 <= world.rule.counts().issued <= 30 + 3 * settings.batch_size


@pytest.mark.report("P45")
def test_batch_when_most_groups_are_filtered_is_always_full() -> None:
    outcome = run(scenario_of(settings_of(), filtered_fraction=0.8))
    assert all(len(step.groups) == 4 for step in outcome.steps)
    assert outcome.counts is not None
    assert outcome.counts.filtered > 3 * outcome.counts.trained
