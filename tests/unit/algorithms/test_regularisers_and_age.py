import pytest
import torch

from asyppo_async.algorithms.aggregation import aggregate, denominator, token_weights
from asyppo_async.algorithms.regularisers import kl_penalty, positive_nll
from asyppo_async.algorithms.token_age import approximate_proximal, stale_tokens, trajectory_staleness

F64 = torch.float64


def test_kl_penalty_when_summed_over_the_policy_then_exact_kl(golden, check):
    mu = torch.tensor([0.5, 0.3, 0.2], dtype=F64)
    pi = torch.tensor([0.4, 0.4, 0.2], dtype=F64)
    for estimator, key in (("k1", "E_k1"), ("k3", "E_k3"), ("k2", "E_k2")):
        check((mu * kl_penalty(mu.log(), pi.log(), estimator)).sum(), golden[key])
    for estimator in ("k1", "k3"):
        check((mu * kl_penalty(mu.log(), pi.log(), estimator)).sum(), golden["kl_exact_mu_pi"])
        check((pi * kl_penalty(pi.log(), mu.log(), estimator)).sum(), golden["kl_exact_pi_mu"])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_penalty_when_differentiated_then_matches_central_differences(estimator):
    policy = torch.tensor([-1.0, -0.3, -2.0], dtype=F64, requires_grad=True)
    reference = torch.tensor([-1.2, -0.1, -2.0], dtype=F64)
    assert torch.autograd.gradcheck(lambda p: kl_penalty(p, reference, estimator), policy)


def test_positive_nll_when_responses_are_right_or_wrong_then_mean_over_right_tokens():
    policy = torch.tensor([-1.0, -2.0, -5.0, -3.0], dtype=F64, requires_grad=True)
    lengths = torch.tensor([2, 1, 1])
    terms, counted = positive_nll(policy, torch.tensor([True, False, True]), lengths)
    weights = token_weights("token-mean", lengths, counted, dtype=F64)
    loss = aggregate(terms, weights, denominator("token-mean", lengths, counted))
    loss.backward()
    assert loss.item() == 2.0
    assert policy.grad.tolist() == pytest.approx([-1 / 3, -1 / 3, 0.0, -1 / 3])


def test_positive_nll_when_nothing_is_right_then_zero():
    terms, counted = positive_nll(torch.tensor([-1.0]), torch.tensor([False]), torch.tensor([1]))
    assert terms.tolist() == [0.0] and not bool(counted.any())


VERSIONS = torch.tensor([5, 5, 6, 6, 6, 6, 6])
LENGTHS = torch.tensor([4, 3])


def test_staleness_when_versions_mix_then_golden_by_token_and_response(golden):
    assert [7 - v for v in VERSIONS.tolist()] == [a for row in golden["stale_tok"] for a in row]
    assert trajectory_staleness(VERSIONS, LENGTHS, 7).tolist() == golden["stale_seq_oldest"]
    assert trajectory_staleness(VERSIONS, LENGTHS, 7, "newest").tolist() == [1.0, 1.0]
    assert trajectory_staleness(VERSIONS, LENGTHS, 7, "mean").tolist() == [1.5, 1.0]
    assert stale_tokens(VERSIONS, 7, 1).tolist() == [True, True] + [False] * 5


def test_approximate_proximal_when_age_varies_then_golden(golden, check):
    behaviour = torch.full((3,), -2.0, dtype=F64)
    policy = torch.full((3,), -1.4, dtype=F64)
    result = approximate_proximal(behaviour, policy, torch.tensor([3, 5, 6]), policy_version=6)
    check(result[:2], golden["a3po"])
    assert result[2] == -2.0
