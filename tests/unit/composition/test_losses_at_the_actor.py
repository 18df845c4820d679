"""Every policy loss at the actor: the library's function on the actor's own log-probs, however the batch is cut."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from asyppo_async.algorithms.policy_losses import LossInputs, PolicyLoss, policy_loss
from asyppo_async.algorithms.sequence_losses import gepo_expectation
from asyppo_async.config.load import config_from_tree
from asyppo_async.trainer.coordinator.arithmetic import decide_tokens
from asyppo_async.trainer.coordinator.batch import batch_of
from asyppo_async.trainer.coordinator.loss_terms import loss_of, reference_of
from asyppo_async.trainer.worker.messages import ActorForward, ActorTrain, PositiveLikelihood
from asyppo_async.trainer.worker.sharding import cut_actor_train
from asyppo_async.types import TokenSequences
from tests.unit.coordinator.worked_batch import LENGTHS, REWARDS, make_group
from tests.unit.worker.learners import (
    actor_request,
    largest_difference,
    open_actor,
    random_sequences,
    write_model,
)

LOSSES = {
    "ppo": PolicyLoss(kind="ppo"),
    "dual_clip": PolicyLoss(kind="ppo", dual_clip=1.5),
    "cispo": PolicyLoss(kind="cispo"),
    "cispo_upper": PolicyLoss(kind="cispo", bounds="upper_only"),
    "cispo_absolute": PolicyLoss(kind="cispo", bounds="absolute", unified_mask=True),
    "dis": PolicyLoss(kind="dis"),
    "gspo": PolicyLoss(kind="gspo"),
    "gspo_token": PolicyLoss(kind="gspo_token"),
    "aspo": PolicyLoss(kind="aspo", dual_clip=3.0),
    "topr": PolicyLoss(kind="topr"),
    "topr_sequence": PolicyLoss(kind="topr", level="sequence"),
    "dppo": PolicyLoss(kind="dppo"),
    "reinforce": PolicyLoss(kind="reinforce"),
    "gepo_expectation": PolicyLoss(kind="gepo_expectation"),
    "gepo_product": PolicyLoss(kind="gepo_expectation", length_normalised=False),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def sequences() -> TokenSequences:
    return random_sequences(3, 9)


def request_for(folder: Path, sequences: TokenSequences, loss: PolicyLoss, **changes: object) -> ActorTrain:
    """References near the policy, as they are in training, and one token that is not counted."""
    policy = open_actor(folder).learner.forward(ActorForward(sequences=sequences, temperature=0.8)).logprobs
    noise = np.random.default_rng(1).normal(0, 0.3, len(policy)).astype(np.float32)
    counted = np.ones(len(policy), dtype=np.bool_)
    counted[4] = False
    request = actor_request(
        sequences, [9], proximal_logprobs=policy + noise, loss=loss, counted=counted, **changes
    )
    request.policy_weights[4] = 0
    return request


def gradients(
    folder: Path, requests: Sequence[ActorTrain], micro_batch_tokens: int = 4096
) -> dict[str, Tensor]:
    """Summed over requests, as over ranks."""
    total: dict[str, Tensor] = {}
    for request in requests:
        actor = open_actor(folder, micro_batch_tokens=micro_batch_tokens)
        actor.learner.train(request)
        for name, gradient in actor.backend.gradients[0].items():
            total[name] = gradient if name not in total else total[name] + gradient
    return total


@pytest.mark.parametrize("name", LOSSES)
def test_loss_of_the_actor_is_that_of_the_function(
    folder: Path, sequences: TokenSequences, name: str
) -> None:
    request = request_for(folder, sequences, LOSSES[name], entropy_coefficient=0.0)
    assert request.counted is not None
    actor = open_actor(folder)
    policy = actor.learner.forward(ActorForward(sequences=sequences, temperature=0.8)).logprobs
    logs, reference = torch.from_numpy(policy).double(), torch.from_numpy(request.proximal_logprobs).double()
    counted = torch.from_numpy(request.counted)
    acted = torch.from_numpy(request.policy_weights != 0)
    used = acted | counted if LOSSES[name].of_whole_responses else acted
    terms = policy_loss(
        LOSSES[name],
        LossInputs(
            policy_logprobs=logs,
            reference_logprobs=reference,
            log_ratio=torch.where(used, logs - reference, torch.zeros_like(logs)),
            advantages=torch.from_numpy(request.advantages).double(),
            lengths=torch.from_numpy(sequences.response_lengths.astype(np.int64)),
            counted=counted,
        ),
        clip_low=request.clip_low,
        clip_high=request.clip_high,
    ).terms
    expected = float((torch.from_numpy(request.policy_weights).double() * terms).sum()) / 37.0
    (step,) = actor.learner.train(request).steps
    assert step.loss == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_does_not_depend_on_micro_batches_or_ranks(
    folder: Path, sequences: TokenSequences, name: str
) -> None:
    request = request_for(folder, sequences, LOSSES[name], kl_coefficient=0.1)
    whole = gradients(folder, [request])
    assert largest_difference(gradients(folder, [request], micro_batch_tokens=14), whole) < 1e-12
    assert largest_difference(gradients(folder, cut_actor_train(request, 2)), whole) < 1e-12


def test_likelihood_of_right_answers_has_its_own_denominator(folder: Path, sequences: TokenSequences) -> None:
    num_tokens = sequences.num_response_tokens
    tokens = np.zeros(num_tokens, dtype=np.bool_)
    tokens[:7] = True
    nothing = np.zeros(num_tokens, dtype=np.float32)
    weights = nothing.copy()
    weights[9] = 1.0
    advantages = nothing
    request = actor_request(
        sequences,
        [9],
        policy_weights=weights,
        advantages=advantages,
        entropy_coefficient=0.0,
        positives=PositiveLikelihood(tokens=tokens, denominators=np.array([7.0]), coefficient=0.1),
    )
    actor = open_actor(folder)
    policy = actor.learner.forward(ActorForward(sequences=sequences, temperature=0.8)).logprobs
    (step,) = actor.learner.train(request).steps
    assert step.loss == pytest.approx(-0.1 * float(policy[:7].mean()), rel=1e-6)
    whole = gradients(folder, [request])
    assert largest_difference(gradients(folder, cut_actor_train(request, 2)), whole) < 1e-12


@pytest.mark.parametrize("length_normalised", [True, False])
def test_group_expectation_of_the_coordinator_makes_the_loss_of_the_paper(length_normalised: bool) -> None:
    config = config_from_tree(
        {"preset": "grpo", "actor": {"model": "a"}, "batch": {"prompts": 2, "group_size": 2}},
        [
            "algorithm.loss=gepo_expectation",
            "algorithm.mismatch=none",
            f"algorithm.gepo_length_normalised={str(length_normalised).lower()}",
        ],
    )
    random = np.random.default_rng(0)
    behaviour = random.normal(-1, 0.3, 10).astype(np.float32)
    groups = [
        make_group(0, LENGTHS[:2], REWARDS[:2], logprobs=behaviour[:5].tolist()),
        make_group(1, LENGTHS[2:], REWARDS[2:], logprobs=behaviour[5:].tolist()),
    ]
    batch = batch_of(0, groups, config)
    proximal = behaviour + random.normal(0, 0.1, 10).astype(np.float32)
    decisions = decide_tokens(
        batch,
        np.zeros((0, 10), dtype=np.float32),
        proximal,
        stale=np.zeros(10, dtype=np.bool_),
        algorithm=config.algorithm,
    )
    reference = reference_of(batch, decisions.mismatch, proximal, config.algorithm)
    policy = torch.from_numpy(proximal).double().requires_grad_()
    lengths = torch.tensor(LENGTHS)
    everything = torch.ones(10, dtype=torch.bool)
    terms = policy_loss(
        loss_of(config.algorithm),
        LossInputs(
            policy_logprobs=policy,
            reference_logprobs=torch.from_numpy(reference).double(),
            log_ratio=policy - torch.from_numpy(reference).double(),
            advantages=decisions.advantages.double(),
            lengths=lengths,
            counted=everything,
        ),
        clip_low=0.2,
        clip_high=0.2,
    ).terms
    expected = gepo_expectation(
        policy,
        torch.from_numpy(behaviour).double(),
        decisions.advantages.double(),
        lengths,
        torch.from_numpy(batch.group_ids),
        length_normalised=length_normalised,
    ).terms
    torch.testing.assert_close(terms, expected, rtol=1e-5, atol=1e-6)
    assert float(expected.detach().abs().max()) > 0


def test_kept_set_at_the_actor_gives_minus_infinity_outside_and_no_weight(
    folder: Path, sequences: TokenSequences
) -> None:
    actor = open_actor(folder)
    full = actor.learner.forward(ActorForward(sequences=sequences, temperature=0.8)).logprobs
    kept = actor.learner.forward(
        ActorForward(sequences=sequences, temperature=0.8, top_k=8, top_p=0.95)
    ).logprobs
    outside = np.isneginf(kept)
    assert 0 < outside.sum() < len(kept)
    assert (kept[~outside] > full[~outside]).all(), "renormalised over fewer tokens"
    request = replace(actor_request(sequences, [9]), top_k=8, top_p=0.95)
    (step,) = open_actor(folder).learner.train(request).steps
    assert step.num_tokens == int(((request.policy_weights != 0) & ~outside).sum())


def test_optimizer_when_reset_steps_as_a_new_one(folder: Path, sequences: TokenSequences) -> None:
    request = actor_request(sequences, [9])
    kept, reset = open_actor(folder), open_actor(folder)
    for actor in (kept, reset):
        actor.learner.train(request)
    fresh = open_actor(folder)
    fresh.module.load_state_dict(reset.module.state_dict())
    kept.learner.train(request)
    reset.learner.train(replace(request, reset_optimizer=True))
    fresh.learner.train(request)
    weights = [dict(actor.module.named_parameters()) for actor in (kept, reset, fresh)]
    assert all(torch.equal(weights[1][name], weights[2][name]) for name in weights[1])
    assert not all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
