"""Loop-written references, token by token in plain Python floats, for what the library does vectorised."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyppo_async.algorithms.aggregation import MODES, denominator, token_weights
from asyppo_async.algorithms.losses import ppo_clip
from asyppo_async.algorithms.metrics import ratio_statistics, staleness_statistics
from asyppo_async.algorithms.mismatch import SequenceGate, TokenRule, correct_mismatch
from asyppo_async.algorithms.packed import (
    count_true,
    segment_max,
    segment_mean,
    segment_sum,
    spread,
    suffix_sum,
)
from asyppo_async.algorithms.weighted_losses import RatioBounds, aspo, cispo, dis, topr

F64 = torch.float64
RULES = [
    TokenRule(kind="none"),
    TokenRule(kind="icepop", low=0.5, high=2.0),
    TokenRule(kind="icepop_mask", low=0.5, high=2.0),
    TokenRule(kind="truncate", high=1.3),
    TokenRule(kind="clamp", low=0.8, high=1.3),
    TokenRule(kind="importance"),
    TokenRule(kind="kpop", high=0.05),
]
GATES = [
    SequenceGate(kind="max_log_ratio", high=1.0),
    SequenceGate(kind="max_ratio", high=2.0),
    SequenceGate(kind="token_band", low=0.4, high=3.0),
    SequenceGate(kind="product", low=0.3, high=3.0),
    SequenceGate(kind="geometric", low=0.8, high=1.25),
    SequenceGate(kind="binary_kl", high=0.02),
]
RESPONSES = st.lists(
    st.lists(st.tuples(st.floats(-3, -0.01), st.floats(-1.5, 1.5), st.booleans()), min_size=0, max_size=5),
    min_size=1,
    max_size=4,
)


def coin_kl(p, q):
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def slow_token(rule, proximal, behaviour):
    rho = math.exp(proximal - behaviour)
    if rule.kind in ("icepop", "icepop_mask"):
        inside = rule.low <= rho <= rule.high
        return inside, (rho if rule.kind == "icepop" else 1.0) if inside else 0.0
    if rule.kind == "kpop":
        p, q = math.exp(proximal), math.exp(behaviour)
        inside = coin_kl(p, q) < rule.high and coin_kl(q, p) < rule.high
        return inside, float(inside)
    return True, {
        "none": 1.0,
        "truncate": min(rho, rule.high),
        "clamp": min(max(rho, rule.low), rule.high),
        "importance": rho,
    }[rule.kind]


def slow_gate(gate, tokens):
    """tokens: (proximal, behaviour) of the valid tokens of a response."""
    if not tokens:
        return True
    logs = [p - b for p, b in tokens]
    low, high = gate.low, gate.high
    divergence = sum(coin_kl(math.exp(b), math.exp(p)) for p, b in tokens) / len(tokens)
    return {
        "max_log_ratio": max(abs(x) for x in logs) <= high,
        "max_ratio": max(math.exp(x) for x in logs) <= high,
        "token_band": all(low <= math.exp(x) <= high for x in logs),
        "product": low <= math.exp(sum(logs)) <= high,
        "geometric": low <= math.exp(sum(logs) / len(logs)) <= high,
        "binary_kl": divergence <= high,
    }[gate.kind]


def pack(responses):
    flat = [token for response in responses for token in response]
    behaviour = torch.tensor([b for b, _, _ in flat], dtype=F64)
    proximal = torch.tensor([min(-0.005, b + d) for b, d, _ in flat], dtype=F64)
    valid = torch.tensor([v for _, _, v in flat], dtype=torch.bool)
    return behaviour, proximal, valid, torch.tensor([len(r) for r in responses])


@given(RESPONSES, st.sampled_from(RULES), st.lists(st.sampled_from(GATES), max_size=3))
@settings(max_examples=150, deadline=None)
def test_correction_when_responses_are_random_then_equals_the_loop(responses, rule, gates):
    behaviour, proximal, valid, lengths = pack(responses)
    garbage = torch.where(valid, proximal, torch.full_like(proximal, torch.nan))
    result = correct_mismatch(garbage, behaviour, lengths, rule=rule, gates=gates, valid=valid)
    position, keep_tokens, weights, keep_sequences = 0, [], [], []
    for response in responses:
        tokens = []
        for _ in response:
            if valid[position]:
                pair = (float(proximal[position]), float(behaviour[position]))
                tokens.append(pair)
                keep, weight = slow_token(rule, *pair)
            else:
                keep, weight = False, 0.0
            keep_tokens.append(keep)
            weights.append(weight)
            position += 1
        keep_sequences.append(all(slow_gate(gate, tokens) for gate in gates))
    assert result.keep_tokens.tolist() == keep_tokens
    assert result.keep_sequences.tolist() == keep_sequences
    torch.testing.assert_close(result.weights, torch.tensor(weights, dtype=F64))
    assert result.counts.num_rejected_tokens == int(valid.sum()) - sum(keep_tokens)


@given(RESPONSES)
@settings(max_examples=60, deadline=None)
def test_segments_when_responses_are_random_then_equal_the_loop(responses):
    _, proximal, valid, lengths = pack(responses)
    parts = [part.tolist() for part in proximal.split(lengths.tolist())]
    flags = [part.tolist() for part in valid.split(lengths.tolist())]
    expected = [sum(part) for part in parts]
    torch.testing.assert_close(segment_sum(proximal, lengths), torch.tensor(expected, dtype=F64))
    to_go = [math.fsum(part[start:]) for part in parts for start in range(len(part))]
    torch.testing.assert_close(suffix_sum(proximal, lengths), torch.tensor(to_go, dtype=F64))
    assert segment_max(proximal, lengths).tolist() == [max(part, default=-math.inf) for part in parts]
    means = []
    for part, flag in zip(parts, flags, strict=True):
        chosen = [x for x, keep in zip(part, flag, strict=True) if keep]
        means.append(sum(chosen) / max(1, len(chosen)))
    torch.testing.assert_close(segment_mean(proximal, lengths, valid), torch.tensor(means, dtype=F64))


@given(RESPONSES, st.sampled_from(MODES))
@settings(max_examples=60, deadline=None)
def test_aggregation_when_responses_are_random_then_equals_the_loop(responses, mode):
    _, proximal, valid, lengths = pack(responses)
    sums, counts = [], []
    for part, flag in zip(proximal.split(lengths.tolist()), valid.split(lengths.tolist()), strict=True):
        sums.append(sum(x for x, keep in zip(part.tolist(), flag.tolist(), strict=True) if keep))
        counts.append(int(flag.sum()))
    present = [(s, n) for s, n in zip(sums, counts, strict=True) if n]
    weights = token_weights(mode, lengths, valid, dtype=F64)
    total = denominator(mode, lengths, valid, max_length=5)
    if not present:
        assert total == 0
        return
    expected = {
        "token-mean": sum(s for s, _ in present) / sum(n for _, n in present),
        "seq-mean-token-mean": sum(s / n for s, n in present) / len(present),
        "seq-mean-token-sum": sum(s for s, _ in present) / len(present),
        "seq-mean-token-sum-norm": sum(s for s, _ in present) / len(present) / 5,
    }[mode]
    result = float((weights * proximal).sum()) / total
    assert math.isclose(result, expected, rel_tol=1e-9, abs_tol=1e-12)


PAIRS = st.lists(st.tuples(st.floats(-3, 3), st.floats(-2, 2)), min_size=1, max_size=8)


@given(PAIRS)
@settings(max_examples=60, deadline=None)
def test_losses_when_tokens_are_random_then_equal_the_loop(pairs):
    logs = torch.tensor([x for x, _ in pairs], dtype=F64)
    advantages = torch.tensor([a for _, a in pairs], dtype=F64)
    policy = torch.full_like(logs, -0.7)

    def compare(terms, slow):
        expected = torch.tensor([slow(math.exp(x), a) for x, a in pairs], dtype=F64)
        torch.testing.assert_close(terms, expected, rtol=1e-9, atol=1e-12)

    def clip(r, low, high):
        return min(max(r, low), high)

    def dual(r, a):
        term = -min(r * a, clip(r, 0.8, 1.28) * a)
        return min(term, -3 * a) if a < 0 else term

    settings_ = {"clip_low": 0.2, "clip_high": 0.28}
    compare(ppo_clip(logs, advantages, **settings_, dual_clip=3.0).terms, dual)
    bounds = RatioBounds.relative(0.2, 0.28)
    compare(cispo(policy, logs, advantages, bounds=bounds).terms, lambda r, a: clip(r, 0.8, 1.28) * a * 0.7)
    compare(
        dis(policy, logs, advantages, clip_low=0.3, clip_high=5.0).terms,
        lambda r, a: (r if 0.7 < r < 6 else 0.0) * a * 0.7,
    )
    compare(topr(policy, logs, advantages).terms, lambda r, a: (1.0 if a > 0 else min(r, 1.0)) * a * 0.7)

    def slow_aspo(r, a):
        if (a < 0 and r < 0.8) or (a > 0 and r > 1.28):
            return 0.0
        return -(min(1 / r, 3.0) if a > 0 else r) * a

    compare(aspo(logs, advantages, **settings_, maximum_weight=3.0).terms, slow_aspo)


@given(PAIRS)
@settings(max_examples=40, deadline=None)
def test_ratio_statistics_when_tokens_are_random_then_equal_the_loop(pairs):
    logs = [x for x, _ in pairs]
    w = [math.exp(x) for x in logs]
    n = len(w)
    statistics = ratio_statistics(torch.tensor(logs, dtype=F64))
    for actual, expected in (
        (statistics.mean, sum(w) / n),
        (statistics.effective_sample_size, sum(w) ** 2 / (n * sum(x * x for x in w))),
        (statistics.chi_square, sum(x * x for x in w) / n - 1),
        (statistics.kl_k1, -sum(logs) / n),
        (statistics.kl_k3, sum(x - 1 - y for x, y in zip(w, logs, strict=True)) / n),
    ):
        assert math.isclose(actual, expected, rel_tol=1e-9, abs_tol=1e-12)
    assert statistics.kl_k3 >= -1e-12 and 0 < statistics.effective_sample_size <= 1 + 1e-12


@given(st.lists(st.lists(st.integers(0, 6), max_size=5), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_staleness_when_versions_are_random_then_equals_the_loop(responses):
    flat = [v for r in responses for v in r]
    if not flat:
        return
    lengths = torch.tensor([len(r) for r in responses])
    statistics = staleness_statistics(torch.tensor(flat), lengths, 6)
    ages = [6 - v for v in flat]
    oldest = [6 - min(r) for r in responses if r]
    assert list(statistics.token_histogram) == [ages.count(a) for a in range(max(ages) + 1)]
    assert list(statistics.sequence_histogram) == [oldest.count(a) for a in range(max(oldest) + 1)]
    assert math.isclose(statistics.mean, sum(ages) / len(ages))
    assert statistics.mixed_share == sum(min(r) != max(r) for r in responses if r) / len(oldest)


@given(st.lists(st.lists(st.booleans(), max_size=5), min_size=1, max_size=6), st.sampled_from([0, 1, 2]))
@settings(max_examples=60, deadline=None)
def test_counts_of_marked_tokens_when_responses_are_random_then_equal_the_loop(responses, kind):
    flags = [[flag if kind == 2 else bool(kind) for flag in response] for response in responses]
    marked = torch.tensor([flag for response in flags for flag in response], dtype=torch.bool)
    lengths = torch.tensor([len(response) for response in responses])
    assert segment_sum(marked, lengths).tolist() == [float(sum(response)) for response in flags]
    assert count_true(marked) == sum(map(sum, flags))
    per_response = torch.arange(len(responses), dtype=F64, requires_grad=True)
    expected = [float(i) for i, response in enumerate(flags) for _ in response]
    assert spread(per_response.detach(), lengths).tolist() == expected
    spread(per_response, lengths).sum().backward()
    assert per_response.grad.tolist() == lengths.tolist()
