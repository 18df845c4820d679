import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyppo_async.algorithms.daps import (
    DapsSettings,
    Disagreement,
    OutcomeCounts,
    PromptOutcomes,
    acceptance,
    critic_probability,
    decide,
    draw_candidate,
    effective_acceptance,
    ramp,
    success_estimate,
    success_of,
    summarise,
)
from asyppo_async.errors import ConfigError

START_VALUES = [-1.3, -0.5, 0.0, 0.6, 1.0]
SUCCESSES = [0, 0, 4, 8, 8]
TRIALS = [0, 8, 8, 8, 8]
SETTINGS = DapsSettings(prior_trials=3.0, minimum_acceptance=0.1, uniform_steps=40, ramp_steps=80)


def outcomes(successes, trials):
    return PromptOutcomes(prompt_id="p", successes=successes, trials=trials)


def estimates():
    return [
        success_estimate(value, outcomes(s, n), prior_trials=3.0)
        for value, s, n in zip(START_VALUES, SUCCESSES, TRIALS, strict=True)
    ]


def test_estimates_when_counts_and_critic_are_mixed_then_golden(golden, check):
    check([critic_probability(value) for value in START_VALUES], golden["daps_pc"])
    check([critic_probability(value) for value in (-1, -0.2, 0, 0.6, 1)], golden["p_from_v"])
    check(estimates(), golden["daps_phat"])
    accepted = [acceptance(p, minimum=0.1) for p in estimates()]
    check(accepted, golden["daps_a"])
    check([a / sum(accepted) for a in accepted], golden["daps_sampling_dist"])
    check(sum(accepted) / 5, golden["daps_accept_expected_per_candidate"])


def test_constants_when_critics_disagree_then_more_floor_less_prior_and_shorter_memory():
    disagreement = Disagreement(floor=0.5, prior=2.0, decay=3.0)
    assert (
        Disagreement().settings_at(SETTINGS, 0.8) == SETTINGS and Disagreement().decay_at(0.99, 0.8) == 0.99
    )
    moved = disagreement.settings_at(SETTINGS, 0.5)
    assert moved.minimum_acceptance == pytest.approx(0.1 + 0.9 * 0.25)
    assert moved.prior_trials == pytest.approx(3 / 2)
    assert disagreement.decay_at(0.99, 0.5) == pytest.approx(0.99**2.5)
    assert Disagreement(floor=4.0).settings_at(SETTINGS, 1.0).minimum_acceptance == 1.0


def test_counts_when_one_prompt_decays_faster_then_only_from_then_on_and_only_it():
    counts = OutcomeCounts(decay=0.9)
    for prompt in ("sure", "unsure"):
        counts.add(prompt, successes=1, trials=2)
    counts.advance()
    counts.set_decay("unsure", 0.5)
    counts.advance()
    copied = counts.copy()
    assert [counts.of(prompt).trials for prompt in ("sure", "unsure")] == pytest.approx([2 * 0.81, 2 * 0.45])
    copied.advance()
    assert copied.of("unsure").successes == pytest.approx(0.45 / 2)


def test_ramp_when_steps_pass_then_golden(golden, check):
    for step, q in golden["daps_ramp"].items():
        assert ramp(int(step), uniform_steps=40, ramp_steps=80) == pytest.approx(q)
    for step, a in golden["daps_aeff_a0.1"].items():
        q = ramp(int(step), uniform_steps=40, ramp_steps=80)
        assert effective_acceptance(0.1, q) == pytest.approx(a)
    assert [ramp(step, uniform_steps=3, ramp_steps=0) for step in (2, 3)] == [0.0, 1.0]


def decayed(steps):
    counts = OutcomeCounts(decay=0.99)
    counts.add("p", successes=6, trials=8)
    for _ in range(steps):
        counts.advance()
    return counts


def test_counts_when_ten_batches_pass_then_golden(golden, check):
    now = decayed(10).of("p")
    check([now.successes, now.trials], golden["daps_decay10"])
    check(success_estimate(0.2, now, prior_trials=3.0), golden["daps_phat_decay10_V0=.2"])
    check(math.log(0.5) / math.log(decayed(1).of("p").trials / 8), golden["daps_halflife"])


def test_counts_when_decayed_before_adding_then_golden_and_not_the_other_order(golden, check):
    counts = decayed(10)
    counts.advance()
    counts.add("p", successes=3, trials=8)
    now = counts.of("p")
    check([now.successes, now.trials], golden["daps_decay_then_new(3/8)"])
    other = decayed(10)
    other.add("p", successes=3, trials=8)
    other.advance()
    check([other.of("p").successes, other.of("p").trials], golden["daps_new_then_decay"])


def test_counts_when_snapshot_is_restored_then_the_same_and_never_tried_is_zero():
    counts = decayed(4)
    restored = OutcomeCounts(decay=0.99, outcomes=counts.snapshot())
    for one in (counts, restored):
        one.advance()
    assert restored.of("p").trials == pytest.approx(counts.of("p").trials)
    assert restored.of("q").trials == 0.0


def test_counts_when_visited_each_batch_then_steady_number(golden):
    counts = OutcomeCounts(decay=0.99)
    for _ in range(3000):
        counts.advance()
        counts.add("p", successes=4, trials=8)
    assert counts.of("p").trials == pytest.approx(golden["daps_steady_N_per8"])


@given(
    st.floats(-5, 5),
    st.floats(0, 1),
    st.floats(0, 1e6),
    st.floats(0.01, 10),
    st.floats(0, 1),
    st.integers(0, 300),
)
@settings(deadline=None)
def test_estimates_when_anything_goes_in_then_probabilities_come_out(
    value, share, trials, prior, minimum, step
):
    p = success_estimate(value, outcomes(share * trials, trials), prior_trials=prior)
    assert -1e-12 <= p <= 1 + 1e-12
    a = acceptance(p, minimum=minimum)
    assert minimum - 1e-9 <= a <= 1 + 1e-9
    assert 0 <= effective_acceptance(a, ramp(step, uniform_steps=40, ramp_steps=80)) <= 1 + 1e-9


def test_decisions_when_repeated_many_times_then_frequency_is_the_acceptance():
    wrong = []
    for value, s, n in zip(START_VALUES, SUCCESSES, TRIALS, strict=True):
        decisions = [decide(3, draw, outcomes(s, n), value, 500, SETTINGS) for draw in range(2000)]
        p = decisions[0].probability
        accepted = sum(decision.accepted for decision in decisions)
        if p < 1:
            wrong.append((accepted - 2000 * p) ** 2 / (2000 * p * (1 - p)))
        else:
            assert accepted == 2000
    # Chi-square with four degrees of freedom: above 18.5 once in a thousand.
    assert sum(wrong) < 18.5


def test_decisions_when_repeated_then_the_same_and_uniform_phase_accepts_all():
    twice = [[decide(1, d, outcomes(0, 8), -1.0, 500, SETTINGS) for d in range(50)] for _ in range(2)]
    assert twice[0] == twice[1]
    assert {decision.accepted for decision in twice[0]} == {True, False}
    assert all(decide(1, d, outcomes(0, 8), -1.0, 39, SETTINGS).accepted for d in range(50))
    assert all(not d.accepted or d.prompt_id == "p" for d in twice[0])


def test_candidates_when_drawn_then_uniform_with_replacement():
    counts = Counter(draw_candidate(0, draw, 7) for draw in range(7000))
    assert set(counts) == set(range(7))
    assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < 22.5
    assert len({draw_candidate(0, draw, 10**6) for draw in range(100)}) > 95


def test_selection_when_candidates_are_drawn_with_replacement_then_proportional_to_acceptance(golden):
    trained = Counter()
    for draw in range(20000):
        prompt = draw_candidate(5, draw, 5)
        if decide(
            5, draw, outcomes(SUCCESSES[prompt], TRIALS[prompt]), START_VALUES[prompt], 500, SETTINGS
        ).accepted:
            trained[prompt] += 1
    total = sum(trained.values())
    for prompt, share in enumerate(golden["daps_sampling_dist"]):
        assert trained[prompt] / total == pytest.approx(share, abs=0.012)


@pytest.mark.parametrize(("successes", "trials"), [(9, 8), (-1, 8)])
def test_counts_when_successes_are_impossible_then_says_so(successes, trials):
    with pytest.raises(ValueError, match="successes lie in"):
        OutcomeCounts(decay=0.99).add("p", successes=successes, trials=trials)


def test_summary_when_some_are_accepted_then_counts_and_shares(golden):
    decisions = [
        decide(3, draw, outcomes(s, n), value, 500, SETTINGS)
        for draw in range(40)
        for value, s, n in zip(START_VALUES, SUCCESSES, TRIALS, strict=True)
    ]
    summary = summarise(decisions)
    assert summary.num_candidates == 200
    assert summary.success_histogram == (80, 0, 0, 0, 0, 40, 0, 0, 0, 80)
    assert summary.mean_probability == pytest.approx(golden["daps_accept_expected_per_candidate"])
    assert summary.accepted_middle_share == pytest.approx(40 / summary.num_accepted)
    assert summary.candidates_per_accepted == 200 / summary.num_accepted
    trials = [trials for decision, trials in zip(decisions, TRIALS * 40, strict=True) if decision.accepted]
    assert summary.accepted_trials == pytest.approx(sum(trials) / len(trials))
    assert summarise([]).num_candidates == 0


def test_success_of_a_reward_is_a_fraction_a_verdict_or_refused() -> None:
    assert [success_of(reward, "fraction") for reward in (-1.0, 0.5, 1.0)] == [0.0, 0.75, 1.0]
    assert [success_of(reward, "binary") for reward in (-1.0, 0.5, 1.0)] == [0.0, 0.0, 1.0]
    assert success_of(1.0, "refuse") == 1.0
    with pytest.raises(ConfigError, match="neither right"):
        success_of(0.5, "refuse")
    for kind in ("fraction", "binary", "refuse"):
        with pytest.raises(ConfigError, match=r"a reward is 1\.5, outside \[-1, 1\]"):
            success_of(1.5, kind)
