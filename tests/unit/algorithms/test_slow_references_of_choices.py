"""Loop-written references, in plain Python floats, for masks, ages, sequence ratios, baselines and calibration."""

import math

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asyppo_async.algorithms.advantages import whiten
from asyppo_async.algorithms.calibration import (
    brier_score,
    calibration_bins,
    ranking_quality,
    value_by_outcome,
)
from asyppo_async.algorithms.confidence import CalibrationError, confidence_value, update_calibration
from asyppo_async.algorithms.critic_data import crossfit_value
from asyppo_async.algorithms.evpo import gated_advantages
from asyppo_async.algorithms.group_advantages import whiten_groups
from asyppo_async.algorithms.packed import segment_extremes, segment_totals
from asyppo_async.algorithms.regularisers import kl_penalty
from asyppo_async.algorithms.sequence_losses import group_entropy, gspo, gspo_token
from asyppo_async.algorithms.token_age import approximate_proximal, trajectory_staleness
from asyppo_async.algorithms.trust_masks import EntropyTracker, gepo_entropy_scale, m2po_keep, opsm_keep
from asyppo_async.algorithms.weighted_losses import dppo

F64 = torch.float64
TOKENS = st.tuples(st.floats(-3, -0.01), st.floats(-1.5, 1.5), st.integers(0, 4))
RESPONSES = st.lists(st.lists(TOKENS, min_size=1, max_size=5), min_size=2, max_size=6)
"""(log-prob, log ratio or advantage, version) of each token."""


def pack(responses):
    flat = [token for response in responses for token in response]
    columns = [torch.tensor(column, dtype=F64) for column in zip(*flat, strict=True)]
    return columns[0], columns[1], columns[2].long(), torch.tensor([len(r) for r in responses])


def close(got, expected):
    torch.testing.assert_close(got, torch.tensor(expected, dtype=F64), rtol=1e-9, atol=1e-12, equal_nan=True)


@given(RESPONSES, st.sampled_from([0.01, 0.04, 0.5]), st.sampled_from(["all", "trust_region"]))
@settings(max_examples=50, deadline=None)
def test_m2po_when_tokens_are_random_then_drops_one_by_one_as_the_loop(responses, threshold, candidates):
    advantages, logs, _, _ = pack(responses)
    advantages = advantages + 1.5
    considered = [
        i for i in range(len(logs)) if candidates == "all" or float(logs[i]) * float(advantages[i]) > 0
    ]
    while considered and sum(float(logs[i]) ** 2 for i in considered) / len(considered) > threshold:
        considered.remove(max(considered, key=lambda i: (abs(float(logs[i])), -i)))
    out_of_reach = [float(logs[i]) * float(advantages[i]) <= 0 for i in range(len(logs))]
    expected = [
        i in considered or (candidates == "trust_region" and out_of_reach[i]) for i in range(len(logs))
    ]
    got = m2po_keep(logs, threshold=threshold, advantages=advantages, candidates=candidates)
    assert got.tolist() == expected


@given(RESPONSES, st.floats(-0.5, 0.5))
@settings(max_examples=40, deadline=None)
def test_opsm_and_sequence_ratios_when_responses_are_random_then_equal_the_loop(responses, threshold):
    _, logs, _, lengths = pack(responses)
    means = [sum(x for _, x, _ in r) / len(r) for r in responses]
    advantages = torch.tensor([(-1.0) ** i * (0.5 + i) for i in range(len(responses))], dtype=F64)
    kept = [float(a) >= 0 or -m <= threshold for a, m in zip(advantages, means, strict=True)]
    assert opsm_keep(advantages, logs, lengths, threshold=threshold).tolist() == kept
    expected = []
    for a, m, r in zip(advantages.tolist(), means, responses, strict=True):
        s = math.exp(m)
        expected += [-min(s * a, min(max(s, 0.8), 1.28) * a)] * len(r)
    spread_out = torch.repeat_interleave(advantages, lengths)
    for loss in (gspo, gspo_token):
        close(loss(logs, spread_out, lengths, clip_low=0.2, clip_high=0.28).terms, expected)


@given(RESPONSES)
@settings(max_examples=40, deadline=None)
def test_entropy_of_groups_and_its_scaling_when_random_then_equal_the_loop(responses):
    logs, _, _, lengths = pack(responses)
    ids = [i % 2 for i in range(len(responses))]
    of_group = [
        -sum(x for r, g in zip(responses, ids, strict=True) if g == group for x, _, _ in r)
        / sum(len(r) for r, g in zip(responses, ids, strict=True) if g == group)
        for group in (0, 1)
    ]
    entropies = group_entropy(logs, lengths, torch.tensor(ids))
    close(entropies, [of_group[g] for g in ids])
    advantages = [0.7 if i % 3 else -0.4 for i in range(len(ids))]
    tracker = EntropyTracker(mean=1.2, variance=0.25)
    factors = {"low_width": 0.2, "high_width": 0.3, "low_factor": 0.5, "high_factor": 0.2}
    expected = []
    for a, g in zip(advantages, ids, strict=True):
        sharp, flat = of_group[g] < 1.2 - 0.2 * 0.5, of_group[g] > 1.2 + 0.3 * 0.5
        expected.append(a * (0.5 if a > 0 and sharp else 0.2 if a < 0 and flat else 1.0))
    close(gepo_entropy_scale(torch.tensor(advantages, dtype=F64), entropies, tracker, **factors), expected)


@given(RESPONSES)
@settings(max_examples=40, deadline=None)
def test_ages_when_versions_are_random_then_equal_the_loop(responses):
    behaviour, change, versions, lengths = pack(responses)
    policy = behaviour + change
    rows = [[5 - v for _, _, v in r] for r in responses]
    close(trajectory_staleness(versions, lengths, 5), [float(max(r)) for r in rows])
    close(trajectory_staleness(versions, lengths, 5, "newest"), [float(min(r)) for r in rows])
    close(trajectory_staleness(versions, lengths, 5, "mean"), [sum(r) / len(r) for r in rows])
    ages = [age for r in rows for age in r]
    expected = [
        b + max(0.0, (age - 1) / age) * (p - b)
        for b, p, age in zip(behaviour.tolist(), policy.tolist(), ages, strict=True)
    ]
    close(approximate_proximal(behaviour, policy, versions, 5), expected)
    smallest, largest = segment_extremes(versions, lengths)
    assert smallest.tolist() == [min(v for _, _, v in r) for r in responses]
    assert largest.tolist() == [max(v for _, _, v in r) for r in responses]
    close(segment_totals(change, lengths), [math.fsum(x for _, x, _ in r) for r in responses])


@given(RESPONSES, st.sampled_from(["k1", "k2", "k3"]))
@settings(max_examples=30, deadline=None)
def test_divergence_and_dppo_when_tokens_are_random_then_equal_the_loop(responses, estimator):
    reference, change, _, _ = pack(responses)
    policy = torch.minimum(reference + change, torch.tensor(-0.001, dtype=F64))
    pairs = list(zip(policy.tolist(), reference.tolist(), strict=True))
    slow = {
        "k1": lambda p, r: p - r,
        "k2": lambda p, r: (p - r) ** 2 / 2,
        "k3": lambda p, r: math.exp(r - p) - 1 - (r - p),
    }[estimator]
    close(kl_penalty(policy, reference, estimator), [slow(p, r) for p, r in pairs])
    advantages = [0.5 if i % 2 else -0.8 for i in range(len(pairs))]

    def slow_dppo(p, m, a):
        moved = math.exp(p) - math.exp(m)
        outside = (a > 0 and moved > 0.2) or (a < 0 and moved < -0.1)
        return (0.0 if outside else -a * math.exp(p - m)) + 1e-3 * (p - m) ** 2

    terms = dppo(
        policy,
        reference,
        torch.tensor(advantages, dtype=F64),
        mask_low=0.1,
        mask_high=0.2,
        kl_coefficient=1e-3,
    ).terms
    close(terms, [slow_dppo(p, m, a) for (p, m), a in zip(pairs, advantages, strict=True)])


@given(RESPONSES, st.integers(2, 3), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_values_of_held_out_critics_when_random_then_equal_the_loop(responses, num_critics, seed):
    generator = torch.Generator().manual_seed(seed)
    _, returns, _, lengths = pack(responses)
    values = torch.rand(num_critics, len(returns), generator=generator, dtype=F64) * 3 - 1.5
    owner = [i % num_critics for i in range(len(responses))]
    trained_on = torch.tensor([[o == m for o in owner] for m in range(num_critics)])
    of_token = [o for o, r in zip(owner, responses, strict=True) for _ in r]
    expected = [
        sum(float(values[m, t]) for m in range(num_critics) if m != o) / (num_critics - 1)
        for t, o in enumerate(of_token)
    ]
    close(crossfit_value(values, trained_on, lengths), expected)

    def bin_of(value):
        return min(3, max(0, math.floor((value + 1) / 2 * 4)))

    errors = torch.rand(num_critics, 4, generator=generator, dtype=F64) + 0.1
    held_out = torch.repeat_interleave(~trained_on, lengths, dim=1)
    updated = update_calibration(CalibrationError(errors=errors), values, returns, held_out, rate=0.3).errors
    weighted = confidence_value(values, CalibrationError(errors=errors))
    for m in range(num_critics):
        for k in range(4):
            squares = [
                (float(values[m, t]) - float(returns[t])) ** 2
                for t, o in enumerate(of_token)
                if o != m and bin_of(float(values[m, t])) == k
            ]
            old = float(errors[m, k])
            new = old if not squares else 0.7 * old + 0.3 * sum(squares) / len(squares)
            assert math.isclose(float(updated[m, k]), new, rel_tol=1e-9)
    for t in range(len(returns)):
        weights = [1 / (float(errors[m, bin_of(float(values[m, t]))]) + 1e-6) for m in range(num_critics)]
        mean = sum(w * float(values[m, t]) for m, w in enumerate(weights)) / sum(weights)
        assert math.isclose(float(weighted[t]), mean, rel_tol=1e-9, abs_tol=1e-12)


def variance(numbers):
    mean = sum(numbers) / len(numbers)
    return sum((x - mean) ** 2 for x in numbers) / len(numbers)


@given(RESPONSES)
@settings(max_examples=40, deadline=None)
def test_baselines_and_whitening_when_random_then_equal_the_loop(responses):
    values, advantages, _, lengths = pack(responses)
    ids = [i % 2 for i in range(len(responses))]
    of_token = [g for g, r in zip(ids, responses, strict=True) for _ in r]
    numbers = advantages.tolist()

    def whitened(chosen):
        mean, spread_ = sum(chosen) / len(chosen), math.sqrt(variance(chosen) + 1e-8)
        return lambda x: (x - mean) / spread_

    close(whiten(advantages), [whitened(numbers)(x) for x in numbers])
    groups = [whitened([x for x, g in zip(numbers, of_token, strict=True) if g == group]) for group in (0, 1)]
    everything = torch.ones(len(numbers), dtype=torch.bool)
    close(
        whiten_groups(advantages, lengths, torch.tensor(ids), everything),
        [groups[g](x) for x, g in zip(numbers, of_token, strict=True)],
    )
    rewards = torch.tensor([1.0 if i % 3 else -1.0 for i in range(len(responses))], dtype=F64)
    returns = torch.repeat_interleave(rewards, lengths)
    errors = [g - v for g, v in zip(returns.tolist(), values.tolist(), strict=True)]
    explained = 1 - variance(errors) / variance(returns.tolist())
    assume(abs(explained) > 1e-9)  # at 0 the last bit decides
    gated = gated_advantages(returns, values, lengths, group_ids=torch.tensor(ids))
    if explained > 0:
        close(gated.advantages, errors)
        return
    of_groups = [[float(x) for x, g in zip(returns, of_token, strict=True) if g == group] for group in (0, 1)]
    means = [sum(group) / len(group) for group in of_groups]
    close(gated.advantages, [float(x) - means[g] for x, g in zip(returns, of_token, strict=True)])


@given(st.lists(st.tuples(st.integers(-12, 12), st.booleans()), min_size=1, max_size=12), RESPONSES)
@settings(max_examples=40, deadline=None)
def test_calibration_when_predictions_are_random_then_equals_the_loop(pairs, responses):
    starts = torch.tensor([v / 10 for v, _ in pairs], dtype=F64)
    correct = torch.tensor([c for _, c in pairs])
    success = [min(1.0, max(0.0, (v / 10 + 1) / 2)) for v, _ in pairs]
    found = calibration_bins(starts, correct, num_bins=4)
    for k, one in enumerate(found):
        inside = [(p, c) for p, (_, c) in zip(success, pairs, strict=True) if min(3, math.floor(p * 4)) == k]
        assert one.count == len(inside)
        if inside:
            assert math.isclose(one.predicted, sum(p for p, _ in inside) / len(inside), abs_tol=1e-12)
            assert math.isclose(one.observed, sum(c for _, c in inside) / len(inside))
    probabilities = torch.tensor(success, dtype=F64)
    squares = [(p - c) ** 2 for p, (_, c) in zip(success, pairs, strict=True)]
    assert math.isclose(brier_score(probabilities, correct), sum(squares) / len(squares), abs_tol=1e-12)
    wins = [
        1.0 if p > q else 0.5 if p == q else 0.0
        for p, (_, c) in zip(success, pairs, strict=True)
        if c
        for q, (_, d) in zip(success, pairs, strict=True)
        if not d
    ]
    auc = ranking_quality(probabilities, correct)
    assert math.isclose(auc, sum(wins) / len(wins)) if wins else math.isnan(auc)
    values, _, _, lengths = pack(responses)
    right = torch.tensor([i % 2 == 0 for i in range(len(responses))])
    outcome = value_by_outcome(values, right, lengths)
    for got, parity in ((outcome.right, 0), (outcome.wrong, 1)):
        of = [x for i, r in enumerate(responses) if i % 2 == parity for x, _, _ in r]
        assert math.isclose(got, sum(of) / len(of), rel_tol=1e-12)
