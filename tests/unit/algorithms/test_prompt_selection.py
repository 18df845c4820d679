"""SPO's prompt values, PCL, GRESO and dynamic sampling."""

from collections import Counter

import pytest

from asyppo_async.algorithms.dynamic_sampling import DynamicSampling, judge_group
from asyppo_async.algorithms.greso import (
    Greso,
    GresoProbabilities,
    GresoSettings,
    adapt,
    adaptive_candidates,
    skip_probability,
)
from asyppo_async.algorithms.prompt_values import (
    PromptValues,
    closest_to_target,
    forget_factor,
    initial_trials,
    spo_weight,
    weighted_index,
)
from asyppo_async.algorithms.seeded import seeded_uniform


def factor(divergence, minimum=0.0, maximum=1.0):
    return forget_factor(divergence, half_divergence=0.06, minimum=minimum, maximum=maximum)


def test_prompt_value_when_updated_then_golden(golden):
    spo = golden["spo"]
    table = PromptValues()
    table.start("p", success_rate=0.75, trials=8)
    assert (table.of("p").value, 1 - table.of("p").value) == (spo["vhat"], spo["A"])
    assert factor(0.06) == spo["rho"]
    table.update("p", reward=1.0, factor=factor(0.06))
    now = table.of("p")
    assert (now.alpha, now.beta, now.value) == (spo["alpha"], spo["beta"], spo["vhat2"])
    assert PromptValues(table.snapshot()).of("p") == now


def test_forget_factor_when_divergence_grows_then_golden_and_clipped(golden):
    assert factor(0.0) == golden["spo_rho_clip"]["D=0"]
    assert factor(0.12) == golden["spo_rho_clip"]["D=2Dh"]
    assert factor(10.0, minimum=0.875) == 0.875 and factor(0.0, maximum=0.96) == 0.96
    assert initial_trials(0.96) == pytest.approx(golden["spo_rho_clip"]["N0(.96)"])


def test_prompt_weight_when_value_varies_then_golden(golden):
    for value, weight in golden["spo_weight"].items():
        assert spo_weight(float(value), floor=0.05) == pytest.approx(weight)
    assert spo_weight(0.5, floor=0.05, trials=4.0, trials_exponent=0.5) == pytest.approx(0.275)


def test_weighted_index_when_drawn_often_then_in_proportion():
    counts = Counter(weighted_index([1.0, 0.0, 3.0], seeded_uniform(0, i)) for i in range(4000))
    assert counts[1] == 0
    assert counts[2] / 4000 == pytest.approx(0.75, abs=0.03)


def test_prompt_value_when_never_started_or_out_of_range_then_says_so():
    table = PromptValues()
    with pytest.raises(ValueError, match="'p' has no value yet"):
        table.of("p")
    table.start("p", success_rate=0.5, trials=2)
    with pytest.raises(ValueError, match="lie in \\[0, 1\\], got -1"):
        table.update("p", reward=-1, factor=1.0)


def test_pcl_when_values_surround_the_target_then_golden(golden):
    values = [0.9, 0.45, 0.52, 0.1, 0.7, 0.3, 0.5, 0.49]
    assert list(closest_to_target(values, 2, target=0.5)) == golden["pcl_pick2of8"]
    assert closest_to_target([0.4, 0.6, 0.4], 2, target=0.5) in {(0, 1), (0, 2)}
    with pytest.raises(ValueError, match="3 prompts cannot be picked out of 2"):
        closest_to_target([0.1, 0.2], 3, target=0.5)


SETTINGS = GresoSettings(
    explore_floor=0.01,
    target_easy=0.25 / 3,
    target_hard=0.5 / 3,
    probability_step=0.01,
    probability_min=0.05,
    probability_max=0.95,
)
HALF = GresoProbabilities(easy=0.5, hard=0.5)


def test_greso_when_run_grows_then_golden_skip_probability(golden):
    for z, probability in golden["greso_skip"].items():
        assert skip_probability(0.5, int(z), explore_floor=0.01) == pytest.approx(probability)


def test_greso_when_shares_are_observed_then_golden_probabilities(golden):
    down, up, easy, hard = golden["greso_adj"]
    assert adapt(0.5, 0.2, easy, SETTINGS) == pytest.approx(down)
    assert adapt(0.5, 0.05, easy, SETTINGS) == pytest.approx(up)
    assert (SETTINGS.target_easy, SETTINGS.target_hard) == pytest.approx((easy, hard))
    assert adapt(0.05, 1.0, easy, SETTINGS) == 0.05 and adapt(0.95, 0.0, easy, SETTINGS) == 0.95
    state = Greso(SETTINGS, HALF)
    state.end_batch(easy_share=0.2, hard_share=0.05, epoch=0)
    assert state.probabilities == HALF
    state.end_batch(easy_share=0.2, hard_share=0.05, epoch=1)
    assert (state.probabilities.easy, state.probabilities.hard) == pytest.approx((0.49, 0.51))


def test_greso_when_groups_return_then_runs_grow_change_kind_and_end():
    state = Greso(SETTINGS, GresoProbabilities(easy=0.5, hard=0.8))
    for _ in range(2):
        state.record("p", num_correct=8, group_size=8)
    assert state.skip_probability("p") == 0.75
    state.record("p", num_correct=0, group_size=8)
    assert state.skip_probability("p") == pytest.approx(0.2)
    restored = Greso(SETTINGS, state.probabilities, state.snapshot())
    assert restored.skip_probability("p") == state.skip_probability("p")
    state.record("p", num_correct=3, group_size=8)
    assert state.skip_probability("p") == 0.0 and not state.skips("p", seed=0, draw=0)


def test_greso_when_a_prompt_is_drawn_often_then_skipped_in_proportion():
    state = Greso(SETTINGS, HALF)
    for _ in range(3):
        state.record("p", num_correct=8, group_size=8)
    skipped = sum(state.skips("p", seed=1, draw=draw) for draw in range(4000))
    assert skipped / 4000 == pytest.approx(0.875, abs=0.02)


def test_greso_when_batch_is_not_full_then_golden_number_of_candidates(golden):
    settings = {"responses_per_prompt": 8, "safety": 1.25, "minimum": 64, "default": 384}
    assert adaptive_candidates(848, 0.4, **settings) == golden["greso_adaptive_bs"]
    assert adaptive_candidates(8, 0.4, **settings) == 64
    assert adaptive_candidates(10**6, 0.4, **settings) == 384
    assert adaptive_candidates(8, 1.0, **settings) == 384


def test_judge_when_counts_run_from_none_to_all_then_only_one_to_k_minus_one_are_kept(golden):
    for right, keep in golden["dapo_keep"].items():
        assert (judge_group(int(right), 8) == "kept") == keep
    with pytest.raises(ValueError, match="cannot have 9"):
        judge_group(9, 8)


def test_dynamic_sampling_when_groups_come_then_fills_and_counts():
    state = DynamicSampling(target_groups=2, max_groups=10)
    assert state.next_request(in_flight=0, default_share=0.5) == 4
    verdicts = [state.offer(num_correct=c, group_size=4) for c in (0, 2, 4, 4)]
    assert verdicts == ["all_wrong", "kept", "all_right", "all_right"]
    assert (state.missing, state.complete, state.counts.kept_share) == (1, False, 0.25)
    assert state.next_request(in_flight=1, default_share=0.5) == 3
    assert [state.offer(num_correct=1, group_size=4) for _ in range(2)] == ["kept", "surplus"]
    assert state.complete
    assert (state.counts.kept, state.counts.surplus, state.counts.judged) == (2, 1, 5)


def test_dynamic_sampling_when_nothing_varies_then_ends_at_its_budget():
    state = DynamicSampling(target_groups=2, max_groups=5)
    generated = 0
    while not state.complete:
        generated += state.next_request(in_flight=0, default_share=0.5)
        state.offer(num_correct=0, group_size=4)
        assert generated < 50
    assert state.counts.judged == 5 and state.missing == 2
    assert state.next_request(in_flight=0, default_share=0.5) == 0
