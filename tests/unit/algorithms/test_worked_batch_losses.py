"""Section 1.6 for the losses that are not AsyPPO's: S3AC (CISPO), bypass, DIS."""

import pytest
import torch

from asyppo_async.algorithms.aggregation import aggregate, denominator, token_weights
from asyppo_async.algorithms.composition import policy_coefficients
from asyppo_async.algorithms.losses import policy_log_ratio, ppo_clip
from asyppo_async.algorithms.mismatch import SequenceGate, TokenRule, correct_mismatch
from asyppo_async.algorithms.token_classes import classify_tokens, token_masks
from asyppo_async.algorithms.weighted_losses import RatioBounds, cispo, dis, reinforce

F64 = torch.float64
MU = torch.tensor([-1.0, -0.5, -2.0, -0.3, -0.7, -4.0, -0.2], dtype=F64)
OLD = torch.tensor([-1.1, -0.5, -1.2, -0.25, -0.6, -2.0, -0.2], dtype=F64)
THETA = torch.tensor([-0.9, -0.55, -1.0, -0.5, -0.6, -1.9, -0.3], dtype=F64)
A = torch.tensor([0.5, -0.5, 1, 1, -1, -1, -1], dtype=F64)
LENGTHS = torch.tensor([4, 3])
S3AC = RatioBounds.relative(0.2, 0.28)
RATIO_SPACE, LOG_SPACE = (
    SequenceGate(kind="max_ratio", high=5.0),
    SequenceGate(kind="max_log_ratio", high=5.0),
)


def s3ac(kind, gate, renormalise, theta=THETA):
    rule = TokenRule(kind=kind, low=0.5, high=5.0)
    correction = correct_mismatch(OLD, MU, LENGTHS, rule=rule, gates=[gate])
    classes = classify_tokens(
        LENGTHS, keep_sequences=correction.keep_sequences, keep_tokens=correction.keep_tokens
    )
    masks = token_masks(classes, renormalise=renormalise)
    coefficients = policy_coefficients(masks, correction.weights)
    terms = cispo(theta, policy_log_ratio(theta, OLD), A, bounds=S3AC).terms
    weights = token_weights("token-mean", LENGTHS, masks.denominator, dtype=F64) * coefficients
    return aggregate(terms, weights, denominator("token-mean", LENGTHS, masks.denominator))


@pytest.mark.parametrize(
    ("kind", "gate", "renormalise", "key"),
    [
        ("icepop_mask", RATIO_SPACE, False, "tp_s3ac_maskonly_den_orig"),
        ("icepop_mask", RATIO_SPACE, True, "tp_s3ac_maskonly_den_kept"),
        ("icepop_mask", LOG_SPACE, False, "tp_s3ac_maskonly_mislog_den_orig"),
        ("icepop_mask", LOG_SPACE, True, "tp_s3ac_maskonly_mislog_den_kept"),
        ("icepop", RATIO_SPACE, False, "tp_s3ac_icepopweight_den_orig"),
        ("icepop", RATIO_SPACE, True, "tp_s3ac_icepopweight_den_kept"),
    ],
)
def test_s3ac_when_worked_batch_then_golden(kind, gate, renormalise, key, golden, check):
    check(s3ac(kind, gate, renormalise), golden[key])


def test_s3ac_when_differentiated_then_golden_gradient(golden, check):
    theta = THETA.clone().requires_grad_()
    s3ac("icepop", RATIO_SPACE, False, theta).backward()
    check(theta.grad, golden["tp_s3ac_gradcoef_weight_den_orig"])


def test_bypass_when_ratio_is_over_behaviour_then_golden_and_double_count_is_another_number(golden, check):
    terms = ppo_clip(policy_log_ratio(THETA, MU), A, clip_low=0.2, clip_high=0.28).terms
    check(terms.mean(), golden["tp_bypass_ppo_u"])
    rho = correct_mismatch(OLD, MU, LENGTHS, rule=TokenRule(kind="truncate", high=2.0)).weights
    check((terms * rho).mean(), golden["tp_double_count_wrong"])


def test_dis_when_worked_batch_then_golden_gradient(golden, check):
    theta = THETA.clone().requires_grad_()
    dis(theta, policy_log_ratio(THETA, MU), A, clip_low=0.3, clip_high=5.0).terms.sum().backward()
    check(theta.grad, golden["tp_dis_gradcoef"])


def test_flash_reinforce_when_gate_rejects_then_the_response_stays_in_the_mean(golden):
    gate = SequenceGate(kind="binary_kl", high=0.025)
    correction = correct_mismatch(OLD, MU, LENGTHS, rule=TokenRule(kind="importance"), gates=[gate])
    assert [g > 0.025 for g in golden["flash_gate"]] == [not k for k in correction.keep_sequences.tolist()]
    masks = token_masks(classify_tokens(LENGTHS, keep_sequences=correction.keep_sequences))
    theta = OLD.clone().requires_grad_()
    mode = "seq-mean-token-mean"
    weights = token_weights(mode, LENGTHS, masks.denominator, dtype=F64)
    weights = weights * policy_coefficients(masks, correction.weights)
    loss = aggregate(reinforce(theta, A).terms, weights, denominator(mode, LENGTHS, masks.denominator))
    loss.backward()
    expected = torch.tensor(golden["w"], dtype=F64) * -A / 4 / 2
    expected[4:] = 0
    torch.testing.assert_close(theta.grad, expected)
