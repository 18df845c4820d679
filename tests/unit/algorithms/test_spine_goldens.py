"""Worked batches that go through several modules: AsyPPO's (algorithms.md 3.4) and the three policies' (1.6)."""

import pytest
import torch

from asyppo_async.algorithms.advantages import gae
from asyppo_async.algorithms.aggregation import aggregate, denominator, token_weights
from asyppo_async.algorithms.critics import ensemble_value, value_std, value_std_masks
from asyppo_async.algorithms.losses import entropy_bonus, policy_log_ratio, policy_ratio, ppo_clip
from asyppo_async.algorithms.metrics import staleness_statistics
from asyppo_async.algorithms.mismatch import SequenceGate, TokenRule, correct_mismatch, log_ratio, ratio
from asyppo_async.algorithms.packed import segment_sum
from asyppo_async.algorithms.sequence_losses import sequence_ratio
from asyppo_async.algorithms.token_classes import classify_tokens, count_classes, token_masks

F64 = torch.float64
LENGTHS = torch.tensor([3, 2, 4, 1])
REWARDS = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=F64)
V1 = [0.10, 0.30, 0.60, -0.2, -0.5, 0.0, 0.2, 0.4, 0.7, -0.1]
V2 = [0.20, 0.26, 0.10, -0.6, -0.52, 0.3, 0.25, 0.96, 0.58, 0.7]
VALUES = torch.tensor([V1, V2], dtype=F64)
LOG_IS = torch.tensor([0.05, -0.10, 0.30, 0.0, -0.25, 0.10, 0.02, 0.26, -0.03, -0.30], dtype=F64)
ENTROPIES = torch.tensor([1.2, 0.5, 0.1, 0.8, 0.3, 2.0, 1.0, 0.2, 0.4, 1.5], dtype=F64)
SEQUENCE_MEAN = "seq-mean-token-mean"

MU = torch.tensor([-1.0, -0.5, -2.0, -0.3, -0.7, -4.0, -0.2], dtype=F64)
OLD = torch.tensor([-1.1, -0.5, -1.2, -0.25, -0.6, -2.0, -0.2], dtype=F64)
THETA = torch.tensor([-0.9, -0.55, -1.0, -0.5, -0.6, -1.9, -0.3], dtype=F64)
A = torch.tensor([0.5, -0.5, 1, 1, -1, -1, -1], dtype=F64)
LENGTHS2 = torch.tensor([4, 3])


def asyppo_terms(logs, masked=True):
    masks = value_std_masks(value_std(VALUES), advantage_share=0.2, entropy_share=0.2)
    advantages = gae(REWARDS, ensemble_value(VALUES), LENGTHS, 1.0)
    loss = ppo_clip(logs, advantages, clip_low=0.2, clip_high=0.2)
    bonus = entropy_bonus(ENTROPIES, 0.01)
    if not masked:
        return loss, loss.terms, bonus, masks
    return loss, loss.terms * masks.advantage_keep, bonus * masks.entropy_keep, masks


def mean(terms, mode=SEQUENCE_MEAN, lengths=LENGTHS, **counted):
    return aggregate(terms, token_weights(mode, lengths, dtype=F64, **counted), denominator(mode, lengths))


def test_asyppo_when_worked_batch_then_every_quantity_is_golden(golden, check):
    check(gae(REWARDS, ensemble_value(VALUES), LENGTHS, 1.0), golden["asy_adv_lam1"])
    check(policy_ratio(LOG_IS), golden["asy_ratio"])
    loss, policy, bonus, _ = asyppo_terms(LOG_IS)
    check(loss.terms, golden["asy_ppo_loss_tok"])
    check(policy + bonus, golden["asy_token_terms"])
    check((loss.clipped_low | loss.clipped_high).double().mean(), golden["asy_clipfrac"])
    check(mean(policy + bonus), golden["asy_loss_seqmean_tokenmean"])
    check(mean(policy + bonus, "token-mean"), golden["asy_loss_tokenmean"])
    _, policy, bonus, _ = asyppo_terms(LOG_IS, masked=False)
    check(mean(policy + bonus), golden["asy_loss_nomask_nofilter"])


def test_asyppo_when_renormalised_by_kept_tokens_then_golden(golden, check):
    _, policy, bonus, masks = asyppo_terms(LOG_IS)
    check(mean(policy, counted=masks.advantage_keep) + mean(bonus), golden["asy_loss_renormalised"])


def test_asyppo_when_differentiated_then_golden_gradient(golden, check):
    logs = LOG_IS.clone().requires_grad_()
    _, policy, _, _ = asyppo_terms(logs)
    mean(policy).backward()
    check(logs.grad, golden["asy_grad_logp_policy_part"])


def test_asyppo_when_cut_into_micro_batches_then_parts_with_global_denominator_sum_up(golden, check):
    _, policy, bonus, _ = asyppo_terms(LOG_IS)
    terms = policy + bonus
    for mode, key in ((SEQUENCE_MEAN, "asy_loss_seqmean_tokenmean"), ("token-mean", "asy_loss_tokenmean")):
        total = denominator(mode, LENGTHS)
        parts = [(slice(0, 5), LENGTHS[:2]), (slice(5, 9), LENGTHS[2:3]), (slice(9, 10), LENGTHS[3:])]
        loss = sum(aggregate(terms[s], token_weights(mode, n, dtype=F64), total) for s, n in parts)
        check(loss, golden[key])
        assert sum(denominator(mode, n) for _, n in parts) == total


def correct(kind="icepop", gates=(), valid=None, old=OLD, mu=MU):
    rule = TokenRule(kind=kind, low=0.5, high=5.0)
    return correct_mismatch(old, mu, LENGTHS2, rule=rule, gates=gates, valid=valid)


def test_three_policies_when_worked_batch_then_golden_ratios(golden, check):
    check(ratio(log_ratio(OLD, MU)), golden["tp_rho"])
    check(ratio(log_ratio(THETA, OLD)), golden["tp_r"])
    check(ratio(log_ratio(THETA, MU)), golden["tp_u"])
    product = ratio(log_ratio(OLD, MU)) * ratio(log_ratio(THETA, OLD))
    error = float((product - ratio(log_ratio(THETA, MU))).abs().max())
    assert error <= 4 * golden["tp_u_eq_rho_r"]
    check(sequence_ratio(log_ratio(OLD, MU), LENGTHS2), golden["tp_seq_geo"])
    check(segment_sum(log_ratio(OLD, MU), LENGTHS2).exp(), golden["tp_seq_prod"])


def test_icepop_when_worked_batch_then_golden_mask_and_weight(golden, check):
    check(correct().keep_tokens.double(), golden["tp_icepop_mask"])
    check(correct().weights, golden["tp_icepop_w"])
    check(correct("icepop_mask").weights, golden["tp_icepop_mask"])


@pytest.mark.parametrize(
    ("kind", "low", "high", "key"),
    [
        ("max_ratio", 0.0, 5.0, "tp_mis_max5"),
        ("product", 0.5, 5.0, "tp_mis_prod_[.5,5]"),
        ("geometric", 0.999, 1.001, "tp_mis_geo_[.999,1.001]"),
        ("binary_kl", 0.0, 3e-3, "tp_mis_geo_[.999,1.001]"),
    ],
)
def test_sequence_gate_when_worked_batch_then_golden(kind, low, high, key, golden, check):
    result = correct(gates=[SequenceGate(kind=kind, low=low, high=high)])
    check(result.keep_sequences.double(), golden[key])


def test_mis_when_in_log_space_then_second_response_is_kept(golden):
    result = correct("icepop_mask", [SequenceGate(kind="max_log_ratio", high=5.0)])
    assert result.keep_sequences.tolist() == [True, True]
    assert int(result.keep_tokens.sum()) == golden["tp_kept_mislog"]


def test_classes_when_both_masks_apply_then_golden_total_mask(golden, check):
    result = correct(gates=[SequenceGate(kind="max_ratio", high=5.0)])
    classes = classify_tokens(LENGTHS2, keep_sequences=result.keep_sequences, keep_tokens=result.keep_tokens)
    check(token_masks(classes).policy.double(), golden["tp_mask_total"])
    assert count_classes(classes).trained == golden["tp_kept"]
    assert int(token_masks(classes).denominator.sum()) == 7
    assert int(token_masks(classes, renormalise=True).denominator.sum()) == 4


def test_areal_when_rejected_above_five_then_golden(golden, check):
    rule = TokenRule(kind="icepop", low=0.0, high=5.0)
    weights = correct_mismatch(OLD, MU, LENGTHS2, rule=rule).weights
    terms = ppo_clip(policy_log_ratio(THETA, OLD), A, clip_low=0.2, clip_high=0.28).terms
    check(mean(terms * weights, "token-mean", LENGTHS2), golden["tp_areal_decoupled_cap5_den_orig"])
    check(mean(terms, "token-mean", LENGTHS2), golden["tp_nocorrection_ppo"])
    for kind, high, key in (
        ("clamp", 5.0, "tp_areal_decoupled_clamp5_den_orig"),
        ("truncate", 2.0, "tp_tis2_ppo_den_orig"),
    ):
        weights = correct_mismatch(OLD, MU, LENGTHS2, rule=TokenRule(kind=kind, high=high)).weights
        check(mean(terms * weights, "token-mean", LENGTHS2), golden[key])


def test_areal_when_it_is_the_first_step_then_the_clip_does_nothing(golden):
    rho = correct_mismatch(OLD, MU, LENGTHS2, rule=TokenRule(kind="importance")).weights
    terms = ppo_clip(policy_log_ratio(OLD, OLD), A, clip_low=0.2, clip_high=0.28).terms
    assert torch.equal(terms * rho, -rho * A), golden["areal_equals_no_min_when_first_step"]


def test_correction_when_behaviour_equals_proximal_then_identity_bit_for_bit(golden):
    result = correct(gates=[SequenceGate(kind="max_log_ratio", high=5.0)], mu=OLD)
    assert bool(result.keep_tokens.all()) and bool(result.keep_sequences.all())
    assert torch.equal(result.weights, torch.ones(7, dtype=F64))
    assert [float(result.keep_tokens.double().min()), float(result.weights.mean())] == golden[
        "tp_identity_mu_eq_old"
    ]
    terms = ppo_clip(policy_log_ratio(THETA, OLD), A, clip_low=0.2, clip_high=0.2).terms
    assert torch.equal(terms * result.weights, terms)


def test_gradient_when_ratio_is_one_then_minus_weight_mask_advantage_over_denominator(check):
    result = correct()
    theta = OLD.clone().requires_grad_()
    terms = ppo_clip(policy_log_ratio(theta, OLD), A, clip_low=0.2, clip_high=0.2).terms
    mean(terms * result.weights, "token-mean", LENGTHS2).backward()
    check(theta.grad, (-result.weights * A / 7).tolist())


def test_staleness_when_versions_mix_then_golden(golden):
    versions = torch.tensor([5, 5, 6, 6, 6, 6, 6])
    statistics = staleness_statistics(versions, LENGTHS2, trainer_version=7)
    assert list(statistics.token_histogram) == golden["stale_hist"][:3]
    assert statistics.sequence_histogram == (0, 1, 1)
    assert statistics.mixed_share == golden["stale_mixed_fraction"]
    assert statistics.maximum == 2
