import math

import pytest
import torch

from asyppo_async.algorithms.aggregation import aggregate, denominator, token_weights
from asyppo_async.algorithms.losses import policy_ratio
from asyppo_async.algorithms.sequence_losses import (
    gepo_expectation,
    group_entropy,
    group_expectation_logs,
    group_expectation_reference,
    group_expectation_weights,
    gspo,
    gspo_token,
    sequence_ratio,
    sequence_weighted,
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
    check(policy_ratio(LOGS), golden["gspo_vs_token"])
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
    check(group_expectation_logs(q, group).exp(), [golden["gepo_expectation"]["Eq"]] * 3)
    check(sequence_ratio(p - q, torch.ones(3, dtype=torch.int64)), golden["gepo_expectation"]["gspo_w"])
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


def test_gepo_expectation_when_a_response_of_the_group_has_no_token_then_it_has_no_share_in_the_expectation():
    policy = torch.tensor([-1.0, -0.5, -1.5, -9.0], dtype=F64)
    behaviour = torch.tensor([-1.2, -0.6, -1.4, torch.nan], dtype=F64)
    counted = torch.tensor([True, True, True, False])
    lengths, groups = torch.tensor([2, 0, 1, 1]), torch.tensor([4, 4, 4, 4])
    q = [math.exp(-1.8), math.exp(-1.4)]
    expectation = (q[0] ** 2 + q[1] ** 2) / (q[0] + q[1])
    advantages = torch.ones(4, dtype=F64)
    loss = gepo_expectation(
        policy, behaviour, advantages, lengths, groups, counted=counted, length_normalised=False
    )
    assert loss.terms[0].item() == pytest.approx(-math.exp(-1.5) / expectation)
    reference = group_expectation_reference(behaviour, lengths, groups, counted, length_normalised=False)
    assert reference.tolist() == pytest.approx([math.log(expectation) / n for n in (2, 2, 1, 1)])
    # A group that has no token at all has no expectation to speak of.
    nothing = group_expectation_reference(behaviour, lengths, groups, torch.zeros(4, dtype=torch.bool))
    assert nothing.tolist() == [0.0] * 4


@pytest.mark.parametrize("length_normalised", [True, False])
def test_sequence_weighted_when_over_the_groups_expectation_then_gepo_expectation(length_normalised):
    policy = torch.tensor([-1.0, -0.5, torch.nan, -1.5, -0.3, -0.8], dtype=F64)
    behaviour = torch.tensor([-1.2, -0.6, -1.0, -1.4, torch.inf, -0.9], dtype=F64)
    counted = torch.tensor([True, True, False, True, False, True])
    lengths, groups = torch.tensor([3, 0, 2, 1]), torch.tensor([4, 4, 4, 2])
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, 0.5], dtype=F64)
    form = {"counted": counted, "length_normalised": length_normalised}
    expected = gepo_expectation(policy, behaviour, advantages, lengths, groups, **form)
    reference = group_expectation_reference(
        behaviour, lengths, groups, counted, length_normalised=length_normalised
    )
    loss = sequence_weighted(policy - reference, advantages, lengths, **form)
    assert bool(loss.terms.isfinite().all())
    torch.testing.assert_close(loss.terms, expected.terms, rtol=1e-12, atol=0.0)
