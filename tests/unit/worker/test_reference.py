"""The frozen reference of a KL penalty: nothing where the policy is the reference, and the right gradient elsewhere."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from asyppo_async.errors import ConfigError, WorkerError
from asyppo_async.trainer.worker.actor import Actor
from asyppo_async.trainer.worker.clients import _merged_reference
from asyppo_async.trainer.worker.messages import ActorForward, ActorTrain
from asyppo_async.trainer.worker.model import load_policy
from asyppo_async.trainer.worker.packing import Cutting
from asyppo_async.trainer.worker.reference import load_reference
from asyppo_async.trainer.worker.sharding import cut_batch
from asyppo_async.trainer.worker.steps import Stepper
from asyppo_async.trainer.worker.world import World
from asyppo_async.types import Float32Array, TokenSequences
from tests.unit.worker.learners import (
    VOCABULARY,
    Learner,
    RecordingBackend,
    actor_request,
    largest_difference,
    open_actor,
    write_model,
)
from tests.unit.worker.test_model import rows_of


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """The tiny model, moved a little."""
    folder = tmp_path_factory.mktemp("elsewhere")
    policy = load_policy(tiny_folder, "float32")
    torch.manual_seed(9)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    policy.module.save_pretrained(folder)
    return folder


def open_held(folder: Path, reference: Path) -> Learner[Actor]:
    """An actor with a frozen reference, in float64."""
    world = World.alone()
    policy = load_policy(folder, "float64")
    backend = RecordingBackend(policy, world)
    stepper = Stepper(backend, world, cutting=Cutting(budget_tokens=40), non_finite_budget=0)
    held_to = load_reference(str(reference), "float64", "cpu", vocab_size=VOCABULARY)
    actor = Actor(policy, stepper, reference=held_to)
    return Learner(learner=actor, backend=backend, module=policy.module)


def reference_logprobs(actor: Learner[Actor], sequences: TokenSequences) -> Float32Array:
    request = ActorForward(sequences=sequences, temperature=0.8, with_reference=True)
    got = actor.learner.forward(request).reference_logprobs
    assert got is not None
    return got


def kl_request(
    sequences: TokenSequences, reference: Float32Array, estimator: Literal["k1", "k2", "k3"]
) -> ActorTrain:
    """Nothing but the KL moves the policy."""
    zeros = np.zeros(sequences.num_response_tokens, dtype=np.float32)
    return actor_request(
        sequences,
        [9],
        advantages=zeros,
        entropy_coefficient=0.0,
        kl_coefficient=0.7,
        kl_estimator=estimator,
        reference_logprobs=reference,
    )


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_at_the_start_is_zero_and_moves_nothing(
    tiny_folder: Path, sequences: TokenSequences, estimator: Literal["k2", "k3"]
) -> None:
    actor = open_held(tiny_folder, tiny_folder)
    request = ActorForward(sequences=sequences, temperature=0.8, with_reference=True)
    result = actor.learner.forward(request)
    assert result.reference_logprobs is not None
    np.testing.assert_array_equal(result.reference_logprobs, result.logprobs)
    (step,) = actor.learner.train(kl_request(sequences, result.reference_logprobs, estimator)).steps
    # float32 log-probs travel; what is left of them is of second order in the loss.
    assert abs(step.loss) < 1e-12 and step.grad_norm < 1e-5


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_gradient_is_that_of_its_definition_written_as_a_loop(
    tiny_folder: Path, elsewhere: Path, sequences: TokenSequences, estimator: Literal["k2", "k3"]
) -> None:
    actor = open_held(tiny_folder, elsewhere)
    frozen = load_policy(elsewhere, "float64").module
    reference = reference_logprobs(actor, sequences)
    request = kl_request(sequences, reference, estimator)
    loss, token = torch.zeros((), dtype=torch.float64), 0
    for ids, num_prompt in rows_of(sequences):
        logs, held_to = (
            (model(ids[None], use_cache=False).logits[0] / 0.8).log_softmax(-1)
            for model in (actor.module, frozen)
        )
        for position in range(num_prompt, len(ids)):
            chosen = position - 1, ids[position]
            assert float(reference[token]) == pytest.approx(float(held_to[chosen].detach()), rel=1e-6)
            gap = float(reference[token]) - logs[chosen]
            term = gap**2 / 2 if estimator == "k2" else gap.exp() - 1 - gap
            loss = loss + 0.7 * float(request.policy_weights[token]) * term / 37.0
            token += 1
    parameters = dict(actor.module.named_parameters())
    expected = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    (step,) = actor.learner.train(request).steps
    assert step.loss == pytest.approx(float(loss.detach()), rel=1e-9) and step.loss > 1e-5
    assert largest_difference(actor.backend.gradients[0], expected) < 1e-9


def test_kl_of_a_token_that_the_reference_cannot_sample_adds_nothing(
    tiny_folder: Path, elsewhere: Path, sequences: TokenSequences
) -> None:
    reference = reference_logprobs(open_held(tiny_folder, elsewhere), sequences)
    outside = np.arange(len(reference)) % 3 == 0
    request = kl_request(sequences, np.where(outside, -np.inf, reference).astype(np.float32), "k3")
    actor = open_actor(tiny_folder)
    actor.learner.train(request)
    lighter = kl_request(sequences, reference, "k3")
    object.__setattr__(
        lighter, "policy_weights", np.where(outside, 0, lighter.policy_weights).astype(np.float32)
    )
    other = open_actor(tiny_folder)
    other.learner.train(lighter)
    assert largest_difference(actor.backend.gradients[0], other.backend.gradients[0]) < 1e-12


def test_reference_when_the_policy_trains_stays_as_it_was(
    tiny_folder: Path, sequences: TokenSequences
) -> None:
    actor = open_held(tiny_folder, tiny_folder)
    before = reference_logprobs(actor, sequences)
    own = actor.learner.forward(ActorForward(sequences=sequences, temperature=0.8)).logprobs
    actor.learner.train(actor_request(sequences, [9]))
    np.testing.assert_array_equal(reference_logprobs(actor, sequences), before)
    after = actor.learner.forward(ActorForward(sequences=sequences, temperature=0.8)).logprobs
    assert float(np.abs(after - own).max()) > 1e-3


def test_reference_when_not_asked_for_is_not_there(tiny_folder: Path, sequences: TokenSequences) -> None:
    assert load_reference("", "float32", "cpu", vocab_size=VOCABULARY) is None
    actor = open_actor(tiny_folder)
    result = actor.learner.forward(ActorForward(sequences=sequences, temperature=0.8))
    assert result.reference_logprobs is None
    with pytest.raises(WorkerError, match="the actor has none"):
        reference_logprobs(actor, sequences)


def test_reference_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", vocab_size=VOCABULARY + 1)
    with pytest.raises(ConfigError, match=r"actor\.reference .* vocabulary of 24 and the actor one of 23"):
        load_reference(str(other), "float32", "cpu", vocab_size=VOCABULARY)


def test_reference_logprobs_of_two_ranks_come_back_in_order(
    tiny_folder: Path, elsewhere: Path, sequences: TokenSequences
) -> None:
    actor = open_held(tiny_folder, elsewhere)
    shards = cut_batch(sequences, 2)
    results = [
        actor.learner.forward(ActorForward(sequences=shard.sequences, temperature=0.8, with_reference=True))
        for shard in shards
    ]
    merged = _merged_reference(shards, results, sequences.num_response_tokens)
    assert merged is not None
    np.testing.assert_allclose(merged, reference_logprobs(actor, sequences), rtol=1e-6)
