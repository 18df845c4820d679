import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyppo_async.algorithms.mismatch import (
    SequenceGate,
    TokenRule,
    apply_sequence_gate,
    binary_kl,
    correct_mismatch,
    inside_band,
    log_ratio,
    ratio,
)
from asyppo_async.algorithms.packed import segment_sum
from asyppo_async.algorithms.sequence_losses import sequence_ratio

F64 = torch.float64
ICEPOP = TokenRule(kind="icepop", low=0.5, high=5.0)


def correct(logs, lengths, rule=ICEPOP, gates=(), valid=None):
    logs = torch.as_tensor(logs)
    return correct_mismatch(
        logs, torch.zeros_like(logs), torch.tensor(lengths), rule=rule, gates=gates, valid=valid
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bound", [0.25, 0.5, 2.0, 4.0, 5.0])
def test_band_when_ratio_is_on_the_bound_then_inclusive(bound, dtype, golden):
    on_bound = torch.tensor([bound], dtype=F64).log().to(dtype)
    if dtype == F64:
        # exp of a log does not always come back, so bounds are compared as logs.
        assert (ratio(on_bound).item() == bound) == golden["exact_bounds_float64"][str(bound)]
    assert inside_band(on_bound, bound, bound + 1).item()
    assert inside_band(on_bound, bound / 2, bound).item()
    assert not inside_band(on_bound + 1e-3, bound / 2, bound).item()
    assert not inside_band(on_bound - 1e-3, bound, bound + 1).item()


def test_ratio_when_it_comes_back_from_its_log_then_not_always_the_bound(golden):
    five, half, below = golden["exp_log_5_exact"]
    assert ratio(torch.tensor([5.0, 0.5], dtype=F64).log()).tolist() == [five, half]
    on_the_bound = torch.tensor([5.0], dtype=F64).log()
    assert inside_band(on_the_bound, 0.0, 5.0).item() == below and five != 5.0


def test_veto_when_one_token_in_many_exceeds_then_long_responses_rarely_pass(golden):
    """In ratio space, with a chance per token; within four standard errors of the closed form."""
    generator = torch.Generator().manual_seed(0)
    cases = zip(((1e-5, 30_000, 300), (1e-4, 1_000, 3_000)), golden["veto_probability"], strict=True)
    for (chance, length, responses), expected in cases:
        hits = torch.rand(responses * length, generator=generator) < chance
        lengths = torch.full((responses,), length)
        gate = SequenceGate(kind="max_ratio", high=5.0)
        vetoed = 1 - float(apply_sequence_gate(hits.float() * 2, lengths, gate).double().mean())
        assert vetoed == pytest.approx(expected, abs=4 * (expected * (1 - expected) / responses) ** 0.5)


def test_gate_when_every_token_is_a_little_off_then_product_and_mean_say_how_much(golden, check):
    logs = torch.full((1000,), golden["support_topp99_len1000_geo_prod"][0], dtype=F64).log()
    lengths = torch.tensor([1000])
    mean_and_product = [sequence_ratio(logs, lengths), segment_sum(logs, lengths).exp()]
    check(torch.cat(mean_and_product), golden["support_topp99_len1000_geo_prod"])
    for kind, low, high in (("geometric", 0.999, 1.001), ("product", 0.5, 2.0)):
        gate = SequenceGate(kind=kind, low=low, high=high)
        assert apply_sequence_gate(logs, lengths, gate).tolist() == [False]


def test_icepop_when_band_is_asymmetric_then_it_bounds_proximal_over_behaviour(golden, check):
    rho = torch.tensor(golden["verl_token_k1_inverse_pitfall"]["rho"], dtype=F64)
    expected = golden["verl_token_k1_inverse_pitfall"]["icepop keep rho in [.5,5]"]
    check(correct(rho.log(), [4]).keep_tokens.double(), expected)
    inverse = golden["verl_token_k1_inverse_pitfall"]["keep 1/rho in [.5,5]"]
    check(correct(-rho.log(), [4]).keep_tokens.double(), inverse)
    assert inverse != expected


def test_gate_when_value_is_on_the_bound_then_kept():
    gate = SequenceGate(kind="max_log_ratio", high=5.0)
    result = correct([5.0, 0.0, -5.0, 5.001], [2, 1, 1], gates=[gate])
    assert result.keep_sequences.tolist() == [True, True, False]
    assert result.counts.rejected_by_gate == (1,)


def test_gate_when_weight_is_clamped_then_it_still_sees_the_raw_ratio():
    rule = TokenRule(kind="clamp", low=0.5, high=2.0)
    result = correct([1.8, 0.0], [2], rule=rule, gates=[SequenceGate(kind="max_ratio", high=5.0)])
    assert result.weights.tolist() == [2.0, 1.0]
    assert result.keep_sequences.tolist() == [False]


def test_gate_when_token_rule_rejects_the_token_then_the_gate_sees_it_still():
    result = correct([6.0, 0.0], [2], gates=[SequenceGate(kind="max_log_ratio", high=5.0)])
    assert result.keep_tokens.tolist() == [False, True]
    assert result.keep_sequences.tolist() == [False]


@pytest.mark.parametrize(
    "kind", ["max_log_ratio", "max_ratio", "token_band", "product", "geometric", "binary_kl"]
)
def test_gate_when_response_is_empty_or_invalid_then_kept(kind):
    valid = torch.tensor([True, False, False])
    gate = SequenceGate(kind=kind, low=1.5, high=2.0)
    logs = torch.tensor([-0.1, torch.nan, torch.inf])
    result = correct_mismatch(
        logs, torch.tensor([-0.1, 0.0, 0.0]), torch.tensor([1, 2, 0]), rule=ICEPOP, gates=[gate], valid=valid
    )
    # A band without 1 would reject a response whose ratio is taken to be 1 for want of tokens.
    assert result.keep_sequences.tolist()[1:] == [True, True]
    assert result.counts.num_sequences == 1


def test_veto_when_any_token_leaves_the_band_then_response_rejected():
    gate = SequenceGate(kind="token_band", low=1e-4, high=20.0)
    assert correct([-10.0, 0.0, 2.9], [2, 1], gates=[gate]).keep_sequences.tolist() == [False, True]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_correction_when_proximal_is_not_finite_then_only_that_token_is_rejected(bad):
    gates = [SequenceGate(kind="max_log_ratio", high=5.0), SequenceGate(kind="geometric", low=0.9, high=1.1)]
    result = correct([0.0, bad, 0.0], [3], gates=gates)
    assert result.keep_tokens.tolist() == [True, False, True]
    assert result.weights.tolist() == [1.0, 0.0, 1.0]
    assert result.keep_sequences.tolist() == [True]
    assert result.log_ratio.tolist() == [0.0, 0.0, 0.0] and result.measured.tolist() == [True, False, True]
    assert result.counts.num_non_finite == 1 and result.counts.num_rejected_tokens == 1


def test_correction_when_ratio_is_extreme_then_weight_is_finite():
    result = correct([800.0, -800.0], [2], rule=TokenRule(kind="importance"))
    assert bool(torch.isfinite(result.weights).all())
    torch.testing.assert_close(result.weights[0], torch.tensor(20.0).exp())


def test_counts_when_tokens_leave_the_band_then_by_side():
    counts = correct([3.0, 2.0, -1.0, 0.0], [4]).counts
    assert (counts.num_below, counts.num_above, counts.num_rejected_tokens, counts.num_tokens) == (1, 2, 3, 4)


@given(st.lists(st.floats(-3, 3), min_size=6, max_size=6), st.lists(st.booleans(), min_size=6, max_size=6))
@settings(max_examples=40, deadline=None)
def test_correction_when_invalid_positions_hold_garbage_then_nothing_changes(logs, flags):
    valid, clean = torch.tensor(flags), torch.tensor(logs, dtype=F64)
    gates = [
        SequenceGate(kind="max_log_ratio", high=2.0),
        SequenceGate(kind="product", low=0.5, high=2.0),
        SequenceGate(kind="geometric", low=0.9, high=1.1),
        SequenceGate(kind="binary_kl", high=0.1),
    ]
    garbage = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, -1e30, 7.0], dtype=F64)
    behaviour = torch.full((6,), -1.0, dtype=F64)
    zero = torch.where(valid, clean, torch.zeros(6, dtype=F64)) - 1.0
    dirty = torch.where(valid, clean - 1.0, garbage)
    lengths = torch.tensor([2, 4])
    first, second = (
        correct_mismatch(p, behaviour, lengths, rule=ICEPOP, gates=gates, valid=valid) for p in (zero, dirty)
    )
    assert torch.equal(first.keep_tokens, second.keep_tokens)
    assert torch.equal(first.keep_sequences, second.keep_sequences)
    assert torch.equal(first.weights, second.weights)
    assert first.counts == second.counts


def test_binary_kl_when_first_response_then_golden(golden, check):
    mu = torch.tensor([-1.0, -0.5, -2.0, -0.3], dtype=F64)
    old = torch.tensor([-1.1, -0.5, -1.2, -0.25], dtype=F64)
    check(binary_kl(mu, old), golden["binary_kl_mu_pi"])


def test_binary_kl_when_probability_is_one_then_finite():
    assert bool(torch.isfinite(binary_kl(torch.tensor([0.0]), torch.tensor([-1e-3]))).all())


def test_log_ratio_when_inputs_are_half_precision_then_float32():
    assert log_ratio(torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)).dtype == torch.float32
    assert log_ratio(torch.zeros(1, dtype=F64), torch.zeros(1)).dtype == F64


@pytest.mark.parametrize("kind", ["max_log_ratio", "max_ratio", "token_band", "product", "geometric"])
def test_gate_when_called_alone_with_garbage_in_unmeasured_tokens_then_not_read(kind):
    gate = SequenceGate(kind=kind, low=0.5, high=2.0)
    logs = torch.tensor([0.1, torch.nan, torch.inf, 3.0, 0.0])
    measured = torch.tensor([True, False, False, True, True])
    keep = apply_sequence_gate(logs, torch.tensor([3, 2]), gate, measured=measured)
    assert keep.tolist() == [True, False]


@pytest.mark.parametrize(("proximal", "behaviour"), [(0.5, 0.9), (0.9, 0.5)])
def test_kpop_when_only_one_direction_is_below_the_bound_then_rejected(proximal, behaviour):
    # KL(.5 || .9) = .5108, KL(.9 || .5) = .3681.
    p, q = torch.tensor([proximal], dtype=F64).log(), torch.tensor([behaviour], dtype=F64).log()
    for high, kept in ((0.36, False), (0.4, False), (0.52, True)):
        result = correct_mismatch(p, q, torch.tensor([1]), rule=TokenRule(kind="kpop", high=high))
        assert result.keep_tokens.tolist() == [kept]
        assert result.weights.tolist() == [float(kept)]
        assert result.counts.num_above == int(not kept)
