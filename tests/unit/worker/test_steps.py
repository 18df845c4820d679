"""Optimizer steps: what is skipped, what is counted, what is measured, and what the optimizer does."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from asyppo_async.errors import TrainingDiverged
from asyppo_async.trainer.worker.backend.plain import PlainBackend
from asyppo_async.trainer.worker.learning_rate import LearningRate
from asyppo_async.trainer.worker.messages import ActorForward
from asyppo_async.trainer.worker.world import World
from asyppo_async.types import TokenSequences, concatenate_sequences
from tests.unit.worker.learners import actor_request, critic_request, open_actor, open_critic


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


def test_step_in_which_nothing_has_weight_is_skipped_and_not_counted(
    tiny_folder: Path, sequences: TokenSequences
) -> None:
    nothing = np.zeros(sequences.num_response_tokens, dtype=np.float32)
    actor = open_actor(tiny_folder, budget=0)
    before = weights_of(actor.module)
    request = actor_request(sequences, [5, 0, 4], policy_weights=nothing, entropy_weights=nothing)
    steps = actor.learner.train(request).steps
    assert [(step.skipped, step.num_tokens, step.loss) for step in steps] == [(True, 0, 0.0)] * 3
    assert same(weights_of(actor.module), before)
    assert actor.backend.gradients == []


def test_step_with_entropy_weights_alone_trains_only_if_the_coefficient_is_not_zero(
    tiny_folder: Path, sequences: TokenSequences
) -> None:
    nothing = np.zeros(sequences.num_response_tokens, dtype=np.float32)
    (still,) = (
        open_actor(tiny_folder)
        .learner.train(actor_request(sequences, [9], policy_weights=nothing, entropy_coefficient=0.0))
        .steps
    )
    (moved,) = (
        open_actor(tiny_folder).learner.train(actor_request(sequences, [9], policy_weights=nothing)).steps
    )
    assert still.skipped and not moved.skipped
    assert moved.num_tokens == 0 and moved.entropy > 0 and math.isnan(moved.ratio_mean)


def test_loss_that_is_not_finite_skips_the_step_and_the_next_one_trains(
    tiny_folder: Path, sequences: TokenSequences
) -> None:
    advantages = actor_request(sequences, [9]).advantages
    weights = np.ones_like(advantages)
    actor = open_actor(tiny_folder, budget=1)
    before = weights_of(actor.module)
    bad = actor_request(
        sequences, [9], policy_weights=weights, advantages=np.where(advantages > 0, np.inf, advantages)
    )
    (step,) = actor.learner.train(bad).steps
    assert step.skipped and not math.isfinite(step.loss)
    assert same(weights_of(actor.module), before)
    assert not actor.learner.train(actor_request(sequences, [9])).steps[0].skipped
    assert not same(weights_of(actor.module), before)


def test_steps_that_are_not_finite_beyond_the_budget_end_the_run(
    tiny_folder: Path, sequences: TokenSequences
) -> None:
    targets = np.full(sequences.num_response_tokens, np.nan, dtype=np.float32)
    critic = open_critic(tiny_folder, budget=1)
    request = critic_request(sequences, [9], targets=targets)
    assert critic.learner.train(request).steps[0].skipped
    with pytest.raises(TrainingDiverged, match=r"the loss is nan.*number 2.*allows 1"):
        critic.learner.train(request)


def test_gradient_that_is_not_finite_leaves_weights_and_optimizer_as_they_were() -> None:
    module = nn.Linear(2, 1)
    backend = plain(module)
    before = weights_of(module)
    backend.backward((module.weight * torch.tensor([1.0, torch.inf])).sum())
    outcome = backend.step()
    assert not outcome.applied and not math.isfinite(outcome.grad_norm)
    assert same(weights_of(module), before)
    backend.backward(module.weight.sum())
    assert backend.step().applied
    # AdamW's first step is lr * sign(gradient): the bad one has left nothing in its moments.
    torch.testing.assert_close(module.weight.detach(), before["weight"] - 0.1, atol=1e-6, rtol=0)


def test_measured_figures_are_those_of_the_tokens_with_weight(
    tiny_folder: Path, sequences: TokenSequences
) -> None:
    request = actor_request(sequences, [9])
    actor = open_actor(tiny_folder)
    current = actor.learner.forward(ActorForward(sequences=sequences, temperature=request.temperature))
    (step,) = actor.learner.train(request).steps
    acted, explored = request.policy_weights != 0, request.entropy_weights != 0
    log_ratio = (current.logprobs - request.proximal_logprobs).astype(np.float64)[acted]
    ratio, advantages = np.exp(log_ratio), request.advantages[acted]
    assert step.num_tokens == acted.sum()
    assert step.entropy == pytest.approx(current.entropies[explored].mean(), rel=1e-5)
    assert step.ratio_mean == pytest.approx(ratio.mean(), rel=1e-5)
    assert step.ratio_max == pytest.approx(ratio.max(), rel=1e-5)
    assert step.kl_proximal == pytest.approx((ratio - 1 - log_ratio).mean(), rel=1e-4)
    assert step.kl_proximal_k1 == pytest.approx(-log_ratio.mean(), rel=1e-4)
    assert step.clip_fraction_low == pytest.approx(((advantages < 0) & (ratio < 0.8)).mean())
    assert step.clip_fraction_high == pytest.approx(((advantages > 0) & (ratio > 1.28)).mean())
    assert step.clip_fraction_low > 0 and step.clip_fraction_high > 0
    for measured, at in ((step.ratio_p1, 0.01), (step.ratio_p99, 0.99)):
        assert math.log(measured) == pytest.approx(math.log(np.quantile(ratio, at)), rel=0.02)
    assert math.isnan(step.masked_clip_fraction)


@pytest.mark.parametrize("micro_batch_tokens", [4096, 14])
def test_clip_of_masked_tokens_is_that_of_the_ratios_that_they_have(
    tiny_folder: Path, sequences: TokenSequences, micro_batch_tokens: int
) -> None:
    plain = actor_request(sequences, [9])
    masked = np.random.default_rng(2).random(len(plain.advantages)) < 0.4
    weights = np.where(masked, np.float32(0), plain.policy_weights)
    # A masked token that the actor does not read for its entropy has no ratio.
    read = masked & (plain.entropy_weights != 0)
    changes = {"policy_weights": weights, "masked": masked, "proximal_logprobs": plain.proximal_logprobs}
    request = actor_request(sequences, [9], **changes)
    actor = open_actor(tiny_folder, micro_batch_tokens=micro_batch_tokens)
    current = actor.learner.forward(ActorForward(sequences=sequences, temperature=request.temperature))
    (step,) = actor.learner.train(request).steps
    ratio = np.exp((current.logprobs - request.proximal_logprobs).astype(np.float64))
    clipped = ((request.advantages < 0) & (ratio < 0.8)) | ((request.advantages > 0) & (ratio > 1.28))
    assert 0 < (clipped & read).sum() < read.sum() < masked.sum()
    assert step.masked_clip_fraction == pytest.approx((clipped & read).sum() / read.sum())
    # Measuring changes no gradient.
    unmeasured = open_actor(tiny_folder, micro_batch_tokens=micro_batch_tokens)
    unmeasured.learner.train(actor_request(sequences, [9], policy_weights=weights))
    (one,), (other,) = actor.backend.gradients, unmeasured.backend.gradients
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_norms_of_head_and_backbone_are_those_of_their_own_tensors(
    tiny_folder: Path, sequences: TokenSequences
) -> None:
    critic = open_critic(tiny_folder)
    (step,) = critic.learner.train(critic_request(sequences, [9])).steps
    (gradients,) = critic.backend.gradients

    def norm(tensors: dict[str, torch.Tensor], *, head: bool) -> float:
        squares = [float(t.double().square().sum()) for n, t in tensors.items() if ("head" in n) == head]
        return math.sqrt(sum(squares))

    assert step.parts is not None
    assert step.parts.head_gradient == pytest.approx(norm(gradients, head=True), rel=1e-6)
    assert step.parts.backbone_gradient == pytest.approx(norm(gradients, head=False), rel=1e-6)
    weights = weights_of(critic.module)
    assert step.parts.head_weights == pytest.approx(norm(weights, head=True), rel=1e-6)
    assert step.parts.backbone_weights == pytest.approx(norm(weights, head=False), rel=1e-6)
    assert 0 < step.parts.head_weights < step.parts.backbone_weights
    (of_actor,) = open_actor(tiny_folder).learner.train(actor_request(sequences, [9])).steps
    assert of_actor.parts is None


@pytest.mark.parametrize(
    ("value_clip", "expected"), [(0.2, (0.32 + 1.125 + 0.405) / 3), (None, (0.125 + 1.125 + 0.405) / 3)]
)
def test_value_loss_by_hand(tiny_folder: Path, value_clip: float | None, expected: float) -> None:
    """`algorithms.md` 2.8: V_old = 0; (V, G) = (.5, 1), (.5, -1), (.1, 1)."""
    sequences = concatenate_sequences([([1, 2], np.array([3, 4, 5], dtype=np.int32))])
    critic = open_critic(tiny_folder)
    values = torch.tensor([0.5, 0.5, 0.1], dtype=torch.float64)
    with torch.no_grad():
        # Solve for a head that gives these values at the three states.
        hidden = critic.module["backbone"](torch.tensor([[1, 2, 3, 4]]), use_cache=False)
        states = hidden.last_hidden_state[0, 1:4]
        critic.module["value_head"].weight.copy_((torch.linalg.pinv(states) @ values)[None])
    request = critic_request(
        sequences,
        [1],
        targets=np.array([1, -1, 1], dtype=np.float32),
        weights=np.ones(3, dtype=np.float32),
        old_values=np.zeros(3, dtype=np.float32),
        value_clip=value_clip,
    )
    (step,) = critic.learner.train(request).steps
    assert step.loss * 37.0 / 3 == pytest.approx(expected, rel=1e-6)
    assert step.clip_fraction_low == pytest.approx(2 / 3 if value_clip else 0.0)


def plain(module: nn.Module, *, warmup_steps: int = 0, weight_decay: float = 0.0) -> PlainBackend:
    return PlainBackend(
        module,
        module,
        world=World.alone(),
        learning_rate=LearningRate(peak=0.1, warmup_steps=warmup_steps),
        weight_decay=weight_decay,
        max_grad_norm=1.0,
    )


def test_learning_rate_rises_linearly_and_a_skipped_step_does_not_count() -> None:
    module = nn.Linear(2, 1)
    backend = plain(module, warmup_steps=4)
    rates = []
    for index in range(7):
        backend.backward(module.weight.sum() * (torch.inf if index == 2 else 1.0))
        rates.append(backend.step().learning_rate)
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.075, 0.1, 0.1, 0.1])


def test_gradient_norm_is_of_all_tensors_together_and_clipping_keeps_the_direction() -> None:
    module = nn.Linear(2, 1)
    backend = plain(module)
    backend.backward(3 * module.weight.sum() + 4 * module.bias.sum())
    assert backend.step().grad_norm == pytest.approx(math.sqrt(9 + 9 + 16))
    first_moment = [state["exp_avg"] for state in backend._optimizer.state.values()]
    torch.testing.assert_close(first_moment[0], torch.full((1, 2), 0.1 * 3 / math.sqrt(34)))


def test_weight_decay_acts_on_matrices_only() -> None:
    module = nn.Linear(2, 1)
    before = weights_of(module)
    backend = plain(module, weight_decay=0.5)
    backend.backward(0 * module.weight.sum())
    backend.step()
    torch.testing.assert_close(module.weight.detach(), before["weight"] * 0.95)
    assert torch.equal(module.bias.detach(), before["bias"])


def test_bfloat16_weights_move_through_their_float32_masters() -> None:
    module = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        module.weight.fill_(1.0)
    rate = LearningRate(peak=1e-3, warmup_steps=0)
    backend = PlainBackend(
        module, module, world=World.alone(), learning_rate=rate, weight_decay=0.0, max_grad_norm=1.0
    )
    seen = []
    for _ in range(5):
        backend.backward(-module.weight.sum().float())
        backend.step()
        seen.append(float(module.weight.detach()))
    # One step of 1e-3 is below half of bfloat16's spacing at 1 (1/128); four of them are not.
    assert seen[0] == 1.0 and seen[-1] == 1.0078125


def test_bfloat16_gradients_of_many_micro_batches_are_summed_in_float32() -> None:
    module = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    backend = plain(module)
    backend.backward(module.weight.sum().float())
    for _ in range(256):
        backend.backward(module.weight.sum().float() / 256)
    assert backend.step().grad_norm == pytest.approx(2.0, rel=1e-3)


@pytest.mark.report("P58")
def test_bfloat16_weight_at_a_rate_of_1e_6_moves_its_master_at_once_and_itself_in_time() -> None:
    module = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    start = 2.0**-10
    with torch.no_grad():
        module.weight.fill_(start)
    backend = PlainBackend(
        module,
        module,
        world=World.alone(),
        learning_rate=LearningRate(peak=1e-6, warmup_steps=0),
        weight_decay=0.0,
        max_grad_norm=1.0,
    )
    served, masters = [], []
    for _ in range(6):
        backend.backward(-module.weight.sum().float())
        backend.step()
        served.append(float(module.weight.detach()))
        masters.append(float(backend._masters[0].detach()))
    assert masters[0] == pytest.approx(start + 1e-6, rel=1e-6)
    # Weights of this size are 2^-17 = 7.6e-6 apart: less than half of it is lost on the weight, never on the master.
    assert served[0] == start and served[-1] == start + 2.0**-17
