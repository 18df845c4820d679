import pytest
import torch

from asyppo_async.algorithms.losses import policy_log_ratio, ppo_clip

F64 = torch.float64


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_ppo_clip_when_differentiated_then_matches_central_differences(dual_clip):
    logs = torch.tensor([0.05, -0.5, 0.7, -0.1, 1.5, 0.0], dtype=F64, requires_grad=True)
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.0, -1.0, 0.3], dtype=F64)
    assert torch.autograd.gradcheck(
        lambda x: ppo_clip(x, advantages, clip_low=0.2, clip_high=0.28, dual_clip=dual_clip).terms, logs
    )


def test_ppo_clip_when_bounds_act_then_flags_by_side():
    logs = torch.tensor([0.5, 0.5, 0.5, -0.5, -0.5, -0.5, 2.0])
    advantages = torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0, 0.0, -1.0])
    loss = ppo_clip(logs, advantages, clip_low=0.2, clip_high=0.28)
    assert loss.clipped_high.tolist() == [True, False, False, False, False, False, False]
    assert loss.clipped_low.tolist() == [False, False, False, False, True, False, False]
    dual = ppo_clip(logs, advantages, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert dual.clipped_high.tolist() == [True, False, False, False, False, False, True]
    assert dual.terms[-1] == 3.0


def test_policy_log_ratio_when_masked_positions_hold_nan_then_zero_loss_and_zero_gradient():
    policy = torch.tensor([-1.0, torch.nan, torch.inf, -800.0], dtype=F64, requires_grad=True)
    reference = torch.tensor([-1.1, torch.nan, -1.0, 800.0], dtype=F64)
    keep = torch.tensor([True, False, False, False])
    terms = ppo_clip(policy_log_ratio(policy, reference, keep), keep * 1.0, clip_low=0.2, clip_high=0.2).terms
    terms.sum().backward()
    assert terms.tolist()[1:] == [0.0, 0.0, 0.0]
    assert policy.grad.tolist()[1:] == [0.0, 0.0, 0.0]
    assert policy.grad[0] != 0


def test_ppo_clip_when_log_ratio_is_extreme_then_finite():
    logs = torch.tensor([800.0, -800.0], requires_grad=True)
    terms = ppo_clip(logs, torch.tensor([-1.0, 1.0]), clip_low=0.2, clip_high=0.2).terms
    terms.sum().backward()
    assert bool(torch.isfinite(terms).all()) and bool(torch.isfinite(logs.grad).all())
