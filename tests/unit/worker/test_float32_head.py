"""A bfloat16 actor whose head multiplies in float32: nearer to float64, and no server without such a head fits it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyppo_async.config.load import config_from_tree
from asyppo_async.errors import ConfigError
from asyppo_async.trainer.coordinator.server_check import differences_of
from asyppo_async.trainer.worker.actor import Actor
from asyppo_async.trainer.worker.control import ComputeDtype
from asyppo_async.trainer.worker.messages import ActorForward
from asyppo_async.trainer.worker.model import load_policy
from asyppo_async.trainer.worker.packing import Cutting
from asyppo_async.trainer.worker.reference import load_reference
from asyppo_async.trainer.worker.steps import Stepper
from asyppo_async.trainer.worker.world import World
from asyppo_async.types import Float32Array, TokenSequences
from tests.unit.coordinator.publish_fleet import expected_of
from tests.unit.rpc.test_codec import info
from tests.unit.worker.learners import VOCABULARY, RecordingBackend, actor_request, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that bfloat16 holds exactly, and logits as large as those of real models, mostly in what is common to all
    tokens: a softmax takes that out again, and rounding to bfloat16 has lost what it stood beside.
    """
    place = write_model(tmp_path_factory.mktemp("rounded"), tie_word_embeddings=False)
    module: Any = load_policy(place, "bfloat16").module
    with torch.no_grad():
        module.model.norm.weight[0] = 16
        module.lm_head.weight[:, 0] = 1
    module.save_pretrained(place)
    return place


def open_with(folder: Path, dtype: ComputeDtype, *, float32_head: bool) -> tuple[Actor, RecordingBackend]:
    policy, world = load_policy(folder, dtype, float32_head=float32_head), World.alone()
    backend = RecordingBackend(policy, world)
    stepper = Stepper(backend, world, cutting=Cutting(budget_tokens=40), non_finite_budget=0)
    held_to = load_reference(str(folder), dtype, "cpu", vocab_size=VOCABULARY, float32_head=float32_head)
    return Actor(policy, stepper, reference=held_to), backend


def logprobs_of(actor: Actor, sequences: TokenSequences) -> Float32Array:
    result = actor.forward(ActorForward(sequences=sequences, temperature=1.0, with_reference=True))
    assert result.reference_logprobs is not None
    np.testing.assert_array_equal(result.reference_logprobs, result.logprobs)
    return result.logprobs


@pytest.mark.report("P25")
def test_logprobs_and_gradients_when_the_head_is_float32_then_they_are_nearer_to_float64(
    folder: Path, sequences: TokenSequences
) -> None:
    actor, backend = open_with(folder, "float64", float32_head=False)
    exact = logprobs_of(actor, sequences)
    actor.train(actor_request(sequences, [9]))
    errors, gradient_errors = [], []
    for float32_head in (True, False):
        other, other_backend = open_with(folder, "bfloat16", float32_head=float32_head)
        errors.append(float(np.abs(logprobs_of(other, sequences) - exact).mean()))
        other.train(actor_request(sequences, [9]))
        (found,), (wanted,) = other_backend.gradients, backend.gradients
        differences = [float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted]
        assert all(torch.isfinite(gradient).all() for gradient in found.values())
        gradient_errors.append(float(np.mean(differences)))
    assert errors[0] < 0.75 * errors[1], errors
    assert gradient_errors[0] < gradient_errors[1], gradient_errors


def test_server_when_only_one_side_has_a_float32_head_then_it_does_not_fit(tiny_folder: Path) -> None:
    (tiny_folder / "tokenizer.json").write_text("{}")
    with_head = expected_of(tiny_folder, float32_head=True)
    for theirs, expected, words in (
        (False, with_head, "its --float32-head is false and actor.float32_head is true"),
        (True, expected_of(tiny_folder), "its --float32-head is true and actor.float32_head is false"),
    ):
        assert any(line.startswith(words) for line in differences_of(info(float32_head=theirs), expected))
    assert not any("head" in line for line in differences_of(info(float32_head=True), with_head))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor.float32_head=true", "changes nothing with actor.dtype = 'float32'"),
        ("actor.reference=ema", "actor.ema_decay = 0 keeps none"),
        ("actor.ema_decay=0.9 actor.lora_rank=8", "whose product is no average of weights"),
    ],
)
def test_settings_of_the_actor_when_they_contradict_each_other_are_refused(override: str, words: str) -> None:
    tree = {"preset": "grpo", "actor": {"model": "a"}, "algorithm": {"kl_coefficient": 0.1}}
    with pytest.raises(ConfigError, match=words):
        config_from_tree(tree, override.split())
