import math

import pytest
import torch

from asyppo_async.algorithms.aggregation import aggregate, denominator, token_weights
from asyppo_async.algorithms.sequence_losses import (
    gepo_expectation,
    group_entropy,
    group_expectation_weights,
    gspo,
    gspo_token,
    sequence_ratio,
)

F64 = torch.float64
LOGS = torch.tensor([1.1, 0.9, 1.3], dtype=F64).log()
THREE = torch.tensor([3])
ONES = torch.ones(3, dtype=F64)
CLIP = {"clip_low": 3e-4, "clip_high": 4e-4}
WIDE = {"clip_low": 0.5, "clip_high": 0.5}


def response_mean(terms, lengths):
    weights = token_weights("seq-mean-token-mean", lengths, dtype=F64)
    return aggregate(terms, weights, denominator("seq-mean-token-mean", lengths))


def test_gspo_when_tokens_differ_then_golden_ratio_and_coefficient(golden, check):
    check(sequence_ratio(LOGS, THREE), [golden["gspo_ratio"]])
    for loss in (gspo, gspo_token):
        logs = LOGS.clone().requires_grad_()
        response_mean(loss(logs, ONES, THREE, **WIDE).terms, THREE).backward()
        check(-logs.grad, [golden["gspo_coef_per_token"]] * 3)


def test_gspo_when_ratio_leaves_the_band_then_clipped(golden):
    logs = LOGS.clone().requires_grad_()
    loss = gspo(logs, ONES, THREE, **CLIP)
    response_mean(loss.terms, THREE).backward()
    assert bool(loss.clipped_high.all()) == golden["gspo_clipped_at_3e-4_4e-4"]
    assert logs.grad.tolist() == [0.0] * 3
    assert loss.terms.tolist() == pytest.approx([-(1 + 4e-4)] * 3)


def test_gspo_when_differentiated_then_matches_central_differences():
    lengths = torch.tensor([2, 3])
    advantages = torch.tensor([1.0, 1.0, -0.5, -0.5, -0.5], dtype=F64)
    logs = torch.tensor([0.1, -0.2, 0.05, 0.3, -0.1], dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: gspo(x, advantages, lengths, **WIDE).terms, logs)


def test_gspo_when_uncounted_tokens_hold_nan_then_ratio_is_of_the_counted():
    logs = torch.cat([LOGS, torch.tensor([torch.nan], dtype=F64)])
    counted = torch.tensor([True, True, True, False])
    loss = gspo(logs, torch.ones(4, dtype=F64), torch.tensor([4]), **WIDE, counted=counted)
    assert loss.terms[0] == pytest.approx(-sequence_ratio(LOGS, THREE).item())


def test_group_expectation_when_probabilities_are_small_then_golden(golden, check):
    q = torch.tensor([0.02, 0.05, 0.01], dtype=F64).log()
    p = torch.tensor([0.03, 0.04, 0.02], dtype=F64).log()
    group = torch.zeros(3, dtype=torch.int64)
    check(group_expectation_weights(p, q, group), golden["gepo_expectation"]["w"])
    # A thousand nats lower the probabilities underflow, the weights do not.
    check(group_expectation_weights(p - 1000, q - 1000, group), golden["gepo_expectation"]["w"])


def test_gepo_expectation_when_two_groups_then_each_has_its_own_expectation():
    policy = torch.tensor([-1.0, -2.0, -0.5, -1.5, -0.7], dtype=F64, requires_grad=True)
    behaviour = torch.tensor([-1.2, -1.8, -0.6, -1.4, -0.9], dtype=F64)
    lengths, groups = torch.tensor([2, 1, 2]), torch.tensor([4, 8, 4])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0], dtype=F64)
    loss = gepo_expectation(policy, behaviour, advantages, lengths, groups, length_normalised=False)
    q = [math.exp(-3.0), math.exp(-2.3)]
    expectation = (q[0] ** 2 + q[1] ** 2) / (q[0] + q[1])
    assert loss.terms[0].item() == pytest.approx(-math.exp(-3.0) / expectation)
    assert loss.terms[2].item() == pytest.approx(math.exp(-0.5) / math.exp(-0.6))
    assert torch.autograd.gradcheck(
        lambda x: gepo_expectation(x, behaviour, advantages, lengths, groups).terms, policy
    )


def test_group_entropy_when_responses_have_lengths_then_mean_over_the_groups_tokens():
    logs = torch.tensor([-1.0, -3.0, -2.0, torch.nan, -0.5], dtype=F64)
    counted = torch.tensor([True, True, True, False, True])
    lengths, groups = torch.tensor([2, 2, 1, 0]), torch.tensor([0, 0, 1, 2])
    assert group_entropy(logs, lengths, groups, counted).tolist() == [2.0, 2.0, 0.5, 0.0]
