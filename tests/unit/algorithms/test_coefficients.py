"""The table of section 6: -d loss / d log pi divided by A, for every loss, against autograd."""

import math

import pytest
import torch

from asyppo_async.algorithms.losses import policy_log_ratio, ppo_clip
from asyppo_async.algorithms.mismatch import TokenRule, correct_mismatch
from asyppo_async.algorithms.weighted_losses import RatioBounds, aspo, cispo, dis, dppo, reinforce, topr

F64 = torch.float64
RATIOS = torch.tensor([0.05, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 4.0, 7.0], dtype=F64)
SYMMETRIC = {"clip_low": 0.2, "clip_high": 0.2}
HIGHER = {"clip_low": 0.2, "clip_high": 0.28}
S3AC = RatioBounds.relative(0.2, 0.28)


def weighted(kind, low=0.0, high=float("inf")):
    """A REINFORCE term with a mismatch weight on the same ratio."""

    def loss(logs, ratios, advantages):
        rule = TokenRule(kind=kind, low=low, high=high)
        fixed = ratios.detach()
        lengths = torch.tensor([len(fixed)])
        weights = correct_mismatch(fixed, torch.zeros_like(fixed), lengths, rule=rule).weights
        return reinforce(logs, advantages).terms * weights

    return loss


LOSSES = {
    "ppo(.2,.2)": lambda p, r, a: ppo_clip(r, a, **SYMMETRIC).terms,
    "ppo dual c=3": lambda p, r, a: ppo_clip(r, a, **SYMMETRIC, dual_clip=3.0).terms,
    "clip-higher(.2,.28)": lambda p, r, a: ppo_clip(r, a, **HIGHER).terms,
    "cispo[.8,1.28]": lambda p, r, a: cispo(p, r, a, bounds=S3AC).terms,
    "cispo max5 (TRL)": lambda p, r, a: cispo(p, r, a, bounds=RatioBounds.absolute(5.0)).terms,
    "dis(.3,5)": lambda p, r, a: dis(p, r, a, clip_low=0.3, clip_high=5.0).terms,
    "aspo(.2,.2)": lambda p, r, a: aspo(r, a, **SYMMETRIC, maximum_weight=3.0).terms,
    "topr": lambda p, r, a: topr(p, r, a).terms,
    "icepop w [.5,5]": weighted("icepop", 0.5, 5.0),
    "icepop m [.5,5]": weighted("icepop_mask", 0.5, 5.0),
    "tis C=2": weighted("truncate", high=2.0),
    "no-clip IS": weighted("importance"),
}


def coefficients(loss, advantage):
    """Through the log-prob of the current policy; the reference is 0, so that a ratio on a bound stays on it."""
    reference = torch.zeros_like(RATIOS)
    policy = (RATIOS.log() + reference).requires_grad_()
    advantages = torch.full_like(RATIOS, advantage)
    terms = loss(policy, policy_log_ratio(policy, reference), advantages)
    (gradient,) = torch.autograd.grad(terms.sum(), policy)
    return -gradient / advantages + 0.0


@pytest.mark.parametrize("sign", ["A=+1", "A=-1"])
@pytest.mark.parametrize("name", LOSSES)
def test_coefficient_when_ratio_varies_then_the_table(name, sign, golden, check):
    assert RATIOS.tolist() == golden["coef_rs"]
    row = golden["coef_table"][sign][name]
    for scale in (1.0, 0.37):
        advantage = scale if sign == "A=+1" else -scale
        check(coefficients(LOSSES[name], advantage), row, rtol=1e-9)


def test_ppo_when_differentiated_then_as_near_to_finite_differences_as_the_independent_program(golden):
    step, worst = 1e-6, 0.0
    for advantage in (1.0, -1.0):
        loss = LOSSES["ppo(.2,.2)"]
        above, below = (
            loss(RATIOS, RATIOS.log() + shift, torch.full_like(RATIOS, advantage)) for shift in (step, -step)
        )
        slopes = -(above - below) / (2 * step) / advantage
        worst = max(worst, float((slopes - coefficients(loss, advantage)).abs().max()))
    assert 0 < worst < 2 * golden["ppo_fd_check"]


def test_every_row_of_the_table_has_a_loss(golden):
    assert set(LOSSES) == set(golden["coef_table"]["A=+1"])


def test_cispo_when_minimax_bounds_then_no_lower_clamp():
    result = coefficients(lambda p, r, a: cispo(p, r, a, bounds=RatioBounds.upper_only(0.28)).terms, 1.0)
    torch.testing.assert_close(result, RATIOS.clamp(max=1.28))


def test_cispo_when_unified_mask_then_zero_where_ppo_clips():
    for advantage, zero in ((1.0, RATIOS > 1.28), (-1.0, RATIOS < 0.8)):
        result = coefficients(
            lambda p, r, a: cispo(p, r, a, bounds=S3AC, unified_mask=(0.2, 0.28)).terms, advantage
        )
        assert torch.equal(result == 0, zero)


def test_cispo_when_weight_is_clamped_then_flagged_by_side():
    logs = RATIOS.log()
    loss = cispo(logs, logs, torch.ones_like(logs), bounds=S3AC)
    assert loss.clipped_low.tolist() == (RATIOS < 0.8).tolist()
    assert loss.clipped_high.tolist() == (RATIOS > 1.28).tolist()


def test_dis_when_ratio_is_on_the_bound_then_rejected():
    on = torch.tensor([0.5, 4.0, 0.5001, 3.9999], dtype=F64).log()
    policy = on.clone().requires_grad_()
    dis(policy, on, torch.ones_like(on), clip_low=0.5, clip_high=3.0).terms.sum().backward()
    assert (policy.grad == 0).tolist() == [True, True, False, False]


def test_topr_when_sequence_level_then_one_ratio_per_response():
    logs = torch.tensor([-0.5, -0.5, 1.0, 0.0, -3.0], dtype=F64)
    policy = torch.full((5,), -1.0, dtype=F64, requires_grad=True)
    advantages = torch.tensor([-1.0, -1.0, -1.0, 1.0, 1.0], dtype=F64)
    topr(policy, logs, advantages, level="sequence", lengths=torch.tensor([2, 1, 2])).terms.sum().backward()
    expected = torch.tensor([math.exp(-1), math.exp(-1), 1.0, -1.0, -1.0], dtype=F64)
    torch.testing.assert_close(policy.grad, expected)


def test_dppo_when_probability_moves_too_far_then_gain_is_dropped(golden):
    values = golden["dppo_tv"]
    policy = torch.tensor([-0.5, -0.5, -1.0, -1.0], dtype=F64, requires_grad=True)
    behaviour = torch.tensor([-1.0, -1.0, -0.5, -0.5], dtype=F64)
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=F64)
    settings = {"mask_low": 0.2, "mask_high": 0.2, "kl_coefficient": 0.0}
    loss = dppo(policy, behaviour, advantages, **settings)
    loss.terms.sum().backward()
    assert policy.detach()[0].exp() - behaviour[0].exp() == pytest.approx(values["pi-mu"])
    assert loss.clipped_high.tolist() == [values["mask A>0 (thr .2)"], False, False, False]
    assert loss.clipped_low.tolist() == [False, values["mask A<0"], True, False]
    ratio = math.exp(0.5)
    torch.testing.assert_close(policy.grad, torch.tensor([0.0, ratio, 0.0, -1 / ratio], dtype=F64))
    with_kl = dppo(policy, behaviour, advantages, mask_low=0.2, mask_high=0.2, kl_coefficient=1e-3)
    torch.testing.assert_close(with_kl.terms - loss.terms, torch.full((4,), 2.5e-4, dtype=F64))


@pytest.mark.parametrize("name", ["cispo[.8,1.28]", "dis(.3,5)", "topr"])
def test_weighted_loss_when_differentiated_then_no_gradient_goes_through_the_ratio(name):
    policy = torch.full_like(RATIOS, -1.0).requires_grad_()
    logs = RATIOS.log().requires_grad_()
    LOSSES[name](policy, logs, torch.ones_like(RATIOS)).sum().backward()
    assert logs.grad is None
    assert policy.grad is not None
