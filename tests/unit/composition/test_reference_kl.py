"""A KL to the frozen reference in whole steps: what it measures, what it costs, what it holds back."""

import itertools
from typing import Literal

import numpy as np
import pytest
import torch

from asyppo_async.trainer.coordinator.loss_terms import divergence_to_go
from benchmarks.trends.learning import TinyRun
from tests.unit.composition.tiny import open_run, shrunk

F64 = torch.float64


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_divergence_to_go_of_hand_numbers_ends_with_each_response() -> None:
    proximal = np.array([-1.0, -2.0, -0.5, -1.0, -3.0], dtype=np.float32)
    reference = np.array([-1.5, -1.0, -0.75, -np.inf, -2.0], dtype=np.float32)
    # k1 = .5, -1, .25 | none (the reference cannot sample it), -1.
    got = divergence_to_go(proximal, reference, torch.tensor([3, 2]))
    assert got.tolist() == pytest.approx([-0.25, -0.75, 0.25, -1.0, -1.0])


def test_gradient_of_k1_as_a_cost_is_that_of_the_kl_of_whole_responses() -> None:
    """Exact, over all responses of two tokens: E[sum_t to_go_t grad log pi_t] = grad KL(pi || ref)."""
    torch.manual_seed(1)
    first, second = torch.randn(3, dtype=F64), torch.randn(3, 3, dtype=F64)
    held_first, held_second = torch.randn(3, dtype=F64), torch.randn(3, 3, dtype=F64)
    weights = [first.requires_grad_(), second.requires_grad_()]
    logs, held = (
        (one.log_softmax(-1), two.log_softmax(-1))
        for one, two in ((first, second), (held_first, held_second))
    )
    pairs = list(itertools.product(range(3), repeat=2))
    policy = torch.stack([torch.stack([logs[0][a], logs[1][a, b]]) for a, b in pairs])
    reference = torch.stack([torch.stack([held[0][a], held[1][a, b]]) for a, b in pairs])
    divergence = (policy.sum(1).exp() * (policy - reference).sum(1)).sum()
    expected = torch.autograd.grad(divergence, weights, retain_graph=True)
    cost = divergence_to_go(
        policy.detach().flatten().numpy().astype(np.float32),
        reference.flatten().numpy().astype(np.float32),
        torch.full((9,), 2),
    ).reshape(9, 2)
    surrogate = (policy.detach().sum(1).exp().unsqueeze(1) * cost * policy).sum()
    for got, wanted in zip(torch.autograd.grad(surrogate, weights), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


async def divergences(estimator: Literal["k1", "k2", "k3"], coefficient: float) -> list[float]:
    """k3 to the reference at the start of each of eight steps."""
    config = shrunk(
        "grpo",
        "actor.reference=initial",
        f"algorithm.kl_estimator={estimator}",
        f"algorithm.kl_coefficient={coefficient}",
    )
    run, _, _ = open_run(config)
    rows = [(await run.train())[1] for _ in range(8)]
    assert all(row["reference/kl_k3"] >= 0 for row in rows)
    return [row["reference/kl_k3"] for row in rows]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
async def test_policy_when_held_to_the_reference_goes_less_far(
    estimator: Literal["k1", "k2", "k3"],
) -> None:
    free = await divergences(estimator, 1e-9)
    held = await divergences(estimator, 3.0)
    assert free[0] == held[0] == 0
    assert free[-1] > 0.01 and held[-1] < 0.6 * free[-1]


async def test_step_without_a_reference_scores_and_reports_none() -> None:
    run: TinyRun
    run, _, _ = open_run(shrunk("grpo"))
    result, row = await run.train()
    assert result.reference_logprobs is None and not any(name.startswith("reference/") for name in row)
