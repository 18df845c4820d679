"""Gradients: against a loop over responses, against finite differences, and whatever the cutting (invariant 5)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from asyppo_async.trainer.worker.messages import ActorTrain, CriticTrain
from asyppo_async.trainer.worker.packing import ranges
from asyppo_async.trainer.worker.sharding import cut_actor_train
from asyppo_async.types import TokenSequences, concatenate_sequences
from tests.unit.worker.learners import (
    actor_request,
    critic_request,
    largest_difference,
    mini_batches,
    open_actor,
    open_critic,
    random_sequences,
)
from tests.unit.worker.test_model import rows_of


def actor_gradients(
    folder: Path, request: ActorTrain, micro_batch_tokens: int = 4096
) -> list[dict[str, Tensor]]:
    actor = open_actor(folder, micro_batch_tokens=micro_batch_tokens)
    actor.learner.train(request)
    return actor.backend.gradients


def critic_gradients(
    folder: Path, request: CriticTrain, micro_batch_tokens: int = 4096
) -> list[dict[str, Tensor]]:
    critic = open_critic(folder, micro_batch_tokens=micro_batch_tokens)
    critic.learner.train(request)
    return critic.backend.gradients


def naive_actor_loss(model: torch.nn.Module, request: ActorTrain) -> Tensor:
    """The objective of the first mini-batch, response by response, token by token."""
    starts = request.sequences.response_lengths.cumsum() - request.sequences.response_lengths
    rows = rows_of(request.sequences)
    loss = torch.zeros((), dtype=torch.float64)
    for sequence in request.mini_batches.sequence_indices[: request.mini_batches.sizes[0]]:
        ids, num_prompt = rows[sequence]
        logs = (model(ids[None], use_cache=False).logits[0] / request.temperature).log_softmax(-1)
        for step in range(len(ids) - num_prompt):
            token = starts[sequence] + step
            state = logs[num_prompt + step - 1]
            if request.policy_weights[token] != 0:
                ratio = (state[ids[num_prompt + step]] - float(request.proximal_logprobs[token])).exp()
                advantage = float(request.advantages[token])
                limited = ratio.clamp(1 - request.clip_low, 1 + request.clip_high)
                gain = torch.minimum(ratio * advantage, limited * advantage)
                loss = loss - float(request.policy_weights[token]) * gain
            entropy = -(state.exp() * state).sum()
            loss = loss - request.entropy_coefficient * float(request.entropy_weights[token]) * entropy
    return loss / request.mini_batches.denominators[0]


def test_actor_gradient_is_that_of_the_objective_written_as_a_loop(
    tiny_folder: Path, sequences: TokenSequences
) -> None:
    request = actor_request(sequences, [9])
    actor = open_actor(tiny_folder)
    loss = naive_actor_loss(actor.module, request)
    parameters = dict(actor.module.named_parameters())
    expected = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    (step,) = actor.learner.train(request).steps
    assert step.loss == pytest.approx(float(loss.detach()), rel=1e-12)
    assert largest_difference(actor.backend.gradients[0], expected) < 1e-12
    assert step.grad_norm == pytest.approx(
        float(torch.stack([gradient.norm() for gradient in expected.values()]).norm()), rel=1e-12
    )


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_gradient_is_the_finite_difference_of_the_loss(
    tiny_folder: Path, sequences: TokenSequences, role: str
) -> None:
    def loss_after(shift: dict[str, Tensor] | None) -> tuple[float, dict[str, Tensor]]:
        learner = open_actor(tiny_folder) if role == "actor" else open_critic(tiny_folder)
        with torch.no_grad():
            for name, parameter in learner.module.named_parameters():
                if shift is not None:
                    parameter.add_(shift[name])
        request = actor_request(sequences, [9]) if role == "actor" else critic_request(sequences, [9])
        (step,) = learner.learner.train(request).steps  # type: ignore[arg-type]
        return step.loss, learner.backend.gradients[0]

    _, gradient = loss_after(None)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        direction = {
            name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            for name, tensor in gradient.items()
        }
        size = 1e-6
        above, _ = loss_after({name: size * tensor for name, tensor in direction.items()})
        below, _ = loss_after({name: -size * tensor for name, tensor in direction.items()})
        expected = sum(float((gradient[name] * direction[name]).sum()) for name in gradient)
        assert (above - below) / (2 * size) == pytest.approx(expected, rel=1e-6)


def permuted(request: ActorTrain, order: Sequence[int]) -> ActorTrain:
    """The same batch with its sequences in another order."""
    sequences = request.sequences
    chosen = np.array(order)
    lengths = sequences.response_lengths.astype(np.int64)
    tokens = ranges((lengths.cumsum() - lengths)[chosen], lengths[chosen])
    rows = rows_of(sequences)
    return actor_request(
        concatenate_sequences(
            [
                (rows[index][0][: rows[index][1]].numpy(), rows[index][0][rows[index][1] :].numpy())
                for index in order
            ]
        ),
        [len(order)],
        **{
            name: getattr(request, name)[tokens]
            for name in ("proximal_logprobs", "advantages", "policy_weights", "entropy_weights")
        },
    )


@pytest.mark.report("P57")
@pytest.mark.parametrize("micro_batch_tokens", [1, 20, 47])
def test_actor_gradients_of_all_steps_do_not_depend_on_the_micro_batches(
    tiny_folder: Path, sequences: TokenSequences, micro_batch_tokens: int
) -> None:
    request = actor_request(sequences, [5, 4, 9])
    whole = actor_gradients(tiny_folder, request)
    cut = actor_gradients(tiny_folder, request, micro_batch_tokens)
    assert len(whole) == len(cut) == 3
    assert max(map(largest_difference, cut, whole)) < 1e-12


@pytest.mark.parametrize("value_clip", [None, 0.2])
def test_critic_gradients_of_all_steps_do_not_depend_on_the_micro_batches(
    tiny_folder: Path, sequences: TokenSequences, value_clip: float | None
) -> None:
    request = critic_request(sequences, [5, 4, 9], value_clip=value_clip)
    whole = critic_gradients(tiny_folder, request)
    for micro_batch_tokens in (1, 20, 47):
        cut = critic_gradients(tiny_folder, request, micro_batch_tokens)
        assert max(map(largest_difference, cut, whole)) < 1e-12


def test_actor_gradient_does_not_depend_on_the_order_of_the_sequences(
    tiny_folder: Path, sequences: TokenSequences
) -> None:
    request = actor_request(sequences, [9])
    (straight,) = actor_gradients(tiny_folder, request)
    (other,) = actor_gradients(tiny_folder, permuted(request, [4, 1, 8, 0, 2, 7, 3, 6, 5]))
    assert largest_difference(other, straight) < 1e-12


def test_actor_gradient_is_the_same_with_responses_that_have_no_weight_and_hold_nan(
    tiny_folder: Path,
) -> None:
    sequences = random_sequences(21, 6)
    request = actor_request(sequences, [6])
    nothing = sequences.response_lengths[:4].sum()
    policy_weights, entropy_weights = request.policy_weights.copy(), request.entropy_weights.copy()
    policy_weights[nothing:] = entropy_weights[nothing:] = 0
    masked = {"policy_weights": policy_weights, "entropy_weights": entropy_weights}
    (without,) = actor_gradients(
        tiny_folder, actor_request(sequences, [4], mini_batches=mini_batches(sequences, [4]), **masked)
    )
    noisy = request.advantages.copy()
    noisy[nothing:] = np.nan
    proximal = np.where(policy_weights == 0, np.nan, request.proximal_logprobs).astype(np.float32)
    noise = {"advantages": noisy, "proximal_logprobs": proximal}
    (with_masked,) = actor_gradients(tiny_folder, actor_request(sequences, [6], **masked, **noise))
    assert largest_difference(with_masked, without) < 1e-12


@pytest.mark.report("P56")
def test_three_ranks_of_which_one_is_empty_come_to_what_one_process_does_with_packed_rows(
    tiny_folder: Path,
) -> None:
    sequences = random_sequences(22, 2)
    request = actor_request(sequences, [2])
    silent = np.arange(sequences.num_response_tokens) % 3 == 1
    cleared = {
        name: np.where(silent, 0, getattr(request, name)).astype(np.float32)
        for name in ("policy_weights", "entropy_weights")
    }
    garbage = {
        name: np.where(silent, np.nan, getattr(request, name)).astype(np.float32)
        for name in ("advantages", "proximal_logprobs")
    }
    request = actor_request(sequences, [2], **cleared, **garbage)
    whole = open_actor(tiny_folder, packed=True)
    whole.learner.train(request)
    parts = []
    for shard in cut_actor_train(request, 3):
        rank = open_actor(tiny_folder, micro_batch_tokens=7)
        rank.learner.train(shard)
        parts += rank.backend.gradients
    assert len(parts) == 2, "the third rank has nothing"
    summed = {name: sum((part[name] for part in parts[1:]), parts[0][name]) for name in parts[0]}
    assert largest_difference(summed, whole.backend.gradients[0]) < 1e-12
