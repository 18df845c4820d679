"""Adapters: gradients, what stays as it is, and the weights that leave the trainer."""

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from asyppo_async.errors import CheckpointError, ConfigError, WorkerError
from asyppo_async.trainer.worker.control import ComputeDtype, RestoreState, SaveState, WorkerRole
from asyppo_async.trainer.worker.fit import check_fit
from asyppo_async.trainer.worker.lora import Adapters
from asyppo_async.trainer.worker.lora_layers import adapt
from asyppo_async.trainer.worker.messages import ActorForward, CriticForward, Save
from asyppo_async.trainer.worker.model import load_policy
from asyppo_async.trainer.worker.names import CheckpointNames
from asyppo_async.trainer.worker.published import (
    AdapterWeights,
    WholeWeights,
    manifest_of_adapters,
    manifest_of_weights,
)
from asyppo_async.trainer.worker.rank import Rank, answer, open_rank
from asyppo_async.trainer.worker.world import World
from asyppo_async.types import TokenSequences
from asyppo_async.weights.adapter import read_adapter
from asyppo_async.weights.manifest import manifest_of_checkpoint
from tests.unit.worker.learners import (
    actor_request,
    critic_request,
    largest_difference,
    lora_settings,
    move_adapters,
    open_actor,
    open_critic,
    write_mixture,
)
from tests.unit.worker.test_gradients import naive_actor_loss

RANK, SCALE = 2, 3.0
LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def trained_names(module: nn.Module) -> set[str]:
    return {name for name, weight in module.named_parameters() if weight.requires_grad}


def together(
    adapters: Adapters, module: nn.Module, pieces: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Every weight by its original name as W + s B A; `pieces` in the place of the module's own A and B."""
    own = dict(module.named_parameters()) | (pieces or {})
    whole = {}
    for name in adapters.original_names(own):
        layer = adapters.layers.get(name)
        whole[name] = (
            own[name] if layer is None else own[layer.base] + SCALE * own[layer.up] @ own[layer.down]
        )
    return whole


def test_gradient_of_adapters_when_compared_with_autograd_over_the_sum_of_both_then_it_is_the_same(
    tiny_folder: Path, sequences: TokenSequences
) -> None:
    request = actor_request(sequences, [9])
    actor = open_actor(tiny_folder, lora=RANK)
    plain = load_policy(tiny_folder, "float64").module
    pieces = {
        name: weight.detach().clone().requires_grad_()
        for name, weight in actor.module.named_parameters()
        if weight.requires_grad
    }
    weights = together(actor.adapters, actor.module, pieces)

    class Whole(nn.Module):
        def forward(self, ids: Tensor, use_cache: bool) -> object:
            return functional_call(plain, weights, (ids,), {"use_cache": use_cache})

    loss = naive_actor_loss(Whole(), request)
    expected = dict(zip(pieces, torch.autograd.grad(loss, list(pieces.values())), strict=True))
    (step,) = actor.learner.train(request).steps
    assert step.loss == pytest.approx(float(loss.detach()), rel=1e-12)
    assert largest_difference(actor.backend.gradients[0], expected) < 1e-12


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_gradients_of_adapters_when_cut_packed_or_computed_again_then_they_are_the_same(
    tiny_folder: Path, sequences: TokenSequences, role: WorkerRole
) -> None:
    def gradients(**how: object) -> list[dict[str, Tensor]]:
        opened = (open_actor if role == "actor" else open_critic)(tiny_folder, lora=RANK, **how)  # type: ignore[operator]
        before = {name: weight.detach().clone() for name, weight in opened.module.named_parameters()}
        request = (actor_request if role == "actor" else critic_request)(sequences, [5, 4, 9])
        opened.learner.train(request)
        learned = trained_names(opened.module)
        adapted = {name.split(".lora_")[0] for name in learned if ".lora_" in name}
        assert {name.rsplit(".", 1)[-1] for name in adapted} == LINEAR
        assert len(learned) == 2 * len(adapted) + (role == "critic"), "a value head trains beside them"
        for name, weight in opened.module.named_parameters():
            assert torch.equal(weight, before[name]) == (name not in learned), name
        return opened.backend.gradients

    whole = gradients()
    for how in (
        {"micro_batch_tokens": 20},
        {"packed": True},
        {"recompute": True},
        {"packed": True, "recompute": True},
    ):
        assert max(map(largest_difference, gradients(**how), whole)) < 1e-12, how


def test_optimizer_when_it_starts_anew_and_steps_are_decayed_then_only_adapters_have_a_state(
    tiny_folder: Path, sequences: TokenSequences
) -> None:
    actor = open_actor(tiny_folder, dtype="float32", lora=RANK)
    actor.learner.train(actor_request(sequences, [5, 4]))
    assert len(actor.backend._optimizer.state) == 2 * len(actor.adapters.layers) == 2 * 2 * len(LINEAR)
    actor.learner.train(actor_request(sequences, [9], reset_optimizer=True))
    steps = {int(state["step"]) for state in actor.backend._optimizer.state.values()}
    assert steps == {1}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_weights_when_adapters_have_trained_then_they_are_the_sum_in_float32_and_the_rest_is_the_base(
    tiny_folder: Path, sequences: TokenSequences, dtype: ComputeDtype
) -> None:
    settings = lora_settings(tiny_folder, "actor", RANK, dtype=dtype, learning_rate=1e-3)
    base = load_file(tiny_folder / "model.safetensors")
    names = CheckpointNames(load_policy(tiny_folder, dtype).module)
    actor = open_actor(tiny_folder, dtype=dtype, lora=RANK)
    actor.learner.train(actor_request(sequences, [9] * 3))
    manifest = manifest_of_weights(names, tiny_folder, dtype)
    sent = dict(WholeWeights(actor.backend, names, manifest, actor.adapters).tensors(here=True))
    assert list(sent) == [spec.name for spec in manifest.tensors]
    own = dict(actor.module.named_parameters())
    masters = dict(zip(actor.backend._names, actor.backend._masters, strict=True))
    for name, tensor in sent.items():
        assert tensor.dtype == getattr(torch, dtype)
        layer = actor.adapters.layers.get(name)
        if layer is None:
            assert torch.equal(tensor, base[name].to(tensor.dtype)), name
            continue
        down, up = (masters[part].to(tensor.dtype).double() for part in (layer.down, layer.up))
        exact = own[layer.base].double() + SCALE * up @ down
        one_step = torch.finfo(tensor.dtype).eps * exact.abs() / 2 + 1e-6 * exact.abs().max()
        assert bool(((tensor.double() - exact).abs() <= one_step).all()), name
        assert not torch.equal(tensor, base[name].to(tensor.dtype))
    assert settings.lora_alpha / settings.lora_rank == SCALE


def test_masters_of_bfloat16_adapters_when_the_rate_is_small_then_they_are_float32_and_gather_steps(
    tiny_folder: Path, sequences: TokenSequences
) -> None:
    actor = open_actor(tiny_folder, dtype="bfloat16", rate=1e-6, lora=RANK)
    before = {name: weight.detach().clone() for name, weight in actor.module.named_parameters()}
    assert {master.dtype for master in actor.backend._masters} == {torch.float32}
    actor.learner.train(actor_request(sequences, [9] * 30))
    for name, master in zip(actor.backend._names, actor.backend._masters, strict=True):
        weight = dict(actor.module.named_parameters())[name]
        assert torch.equal(weight, master.bfloat16())
        assert bool((master != before[name].float()).any()), name


def open_lora_rank(folder: Path, role: WorkerRole, **changes: object) -> Rank:
    rank = open_rank(lora_settings(folder, role, RANK, learning_rate=1e-2, **changes), World.alone(), "cpu")
    move_adapters(rank.state._backend._module)  # type: ignore[attr-defined]
    return rank


def train(rank: Rank, role: WorkerRole, sequences: TokenSequences) -> None:
    answer(rank, (actor_request if role == "actor" else critic_request)(sequences, [5, 4]))


def outputs(rank: Rank, role: WorkerRole, sequences: TokenSequences) -> np.ndarray:
    if role == "actor":
        return answer(rank, ActorForward(sequences=sequences, temperature=1.0)).logprobs  # type: ignore[union-attr]
    return answer(rank, CriticForward(sequences=sequences)).values  # type: ignore[union-attr]


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_saved_model_when_loaded_as_a_whole_or_through_peft_then_it_computes_what_the_trainer_does(
    tiny_folder: Path, sequences: TokenSequences, tmp_path: Path, role: WorkerRole
) -> None:
    rank = open_lora_rank(tiny_folder, role)
    train(rank, role, sequences)
    expected = outputs(rank, role, sequences)
    answer(rank, Save(folder=str(tmp_path / "whole")))
    answer(rank, Save(folder=str(tmp_path / "adapter"), adapter=True))
    without = open_rank(lora_settings(tmp_path / "whole", role, 0), World.alone(), "cpu")
    np.testing.assert_allclose(outputs(without, role, sequences), expected, atol=2e-5)
    files = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files and "config.json" not in files
    assert ("value_head.safetensors" in files) == (role == "critic")
    if role == "actor":
        base = AutoModelForCausalLM.from_pretrained(tiny_folder)
        ids = torch.arange(7)[None]
        through_peft = PeftModel.from_pretrained(base, tmp_path / "adapter")(ids).logits
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")(ids).logits
        torch.testing.assert_close(through_peft, whole, atol=2e-5, rtol=0)


def test_adapters_alone_when_published_then_they_are_those_of_the_folder_that_peft_reads(
    tiny_folder: Path, sequences: TokenSequences, tmp_path: Path
) -> None:
    rank = open_lora_rank(tiny_folder, "actor")
    train(rank, "actor", sequences)
    answer(rank, Save(folder=str(tmp_path / "adapter"), adapter=True))
    adapter = read_adapter(tmp_path / "adapter", "float32")
    module, adapters = rank._files._backend._module, rank._files._adapters  # type: ignore[attr-defined]
    shapes = {name: tuple(weight.shape) for name, weight in module.named_parameters()}
    base = manifest_of_checkpoint(tiny_folder, "float32")
    manifest = manifest_of_adapters(adapters, shapes, base)
    sent = dict(AdapterWeights(rank._files._backend, adapters, manifest).tensors(here=True))  # type: ignore[attr-defined]
    assert list(sent) == [spec.name for spec in manifest.tensors]
    assert manifest.difference(adapter.manifest) == []
    for name, tensor in adapter.tensors:
        assert torch.equal(sent[name], tensor), name


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_rank_with_adapters_when_restored_then_it_trains_on_bit_for_bit_and_its_state_is_small(
    tiny_folder: Path, sequences: TokenSequences, tmp_path: Path, role: WorkerRole
) -> None:
    rank = open_lora_rank(tiny_folder, role, dtype="bfloat16")
    train(rank, role, sequences)
    answer(rank, SaveState(folder=str(tmp_path / "state")))
    train(rank, role, sequences)
    with safe_open(tmp_path / "state" / "state-0.safetensors", framework="pt") as file:
        assert all(".lora_" in key or "value_head" in key for key in file.keys())  # noqa: SIM118 - it is no mapping
    again = open_lora_rank(tiny_folder, role, dtype="bfloat16")
    answer(again, RestoreState(folder=str(tmp_path / "state")))
    train(again, role, sequences)
    np.testing.assert_array_equal(outputs(again, role, sequences), outputs(rank, role, sequences))


def test_state_when_the_model_below_the_adapters_has_changed_then_it_is_refused(
    tiny_folder: Path, tmp_path: Path
) -> None:
    rank = open_lora_rank(tiny_folder, "actor")
    answer(rank, SaveState(folder=str(tmp_path / "state")))
    answer(rank, Save(folder=str(tmp_path / "other")))
    for settings in (
        lora_settings(tmp_path / "other", "actor", RANK),
        lora_settings(tiny_folder, "actor", 0),
    ):
        with pytest.raises(CheckpointError, match="adapters for other weights"):
            answer(open_rank(settings, World.alone(), "cpu"), RestoreState(folder=str(tmp_path / "state")))


def test_adapters_when_asked_for_where_there_are_none_then_refused(tiny_folder: Path, tmp_path: Path) -> None:
    rank = open_rank(lora_settings(tiny_folder, "actor", 0), World.alone(), "cpu")
    with pytest.raises(WorkerError, match=r"actor\.lora_rank is 0"):
        answer(rank, Save(folder=str(tmp_path / "adapter"), adapter=True))


def test_layers_when_named_then_they_alone_get_adapters_whatever_the_type(tiny_folder: Path) -> None:
    drawn = {}
    for dtype in ("float64", "bfloat16"):
        module = load_policy(tiny_folder, dtype).module
        settings = lora_settings(tiny_folder, "actor", RANK, lora_targets=["q_proj", "layers.1.mlp.up_proj"])
        adapters = adapt(module, settings)
        assert sorted(layer.module for layer in adapters.layers.values()) == [
            "model.layers.0.self_attn.q_proj",
            "model.layers.1.mlp.up_proj",
            "model.layers.1.self_attn.q_proj",
        ]
        assert adapters.targets == ("q_proj", "layers.1.mlp.up_proj")
        assert len(trained_names(module)) == 6
        drawn[dtype] = dict(module.named_parameters())[
            "model.layers.1.self_attn.q_proj.lora_A.default.weight"
        ]
    assert torch.equal(drawn["float64"].bfloat16(), drawn["bfloat16"]), "the same numbers for every type"


@pytest.mark.parametrize(
    ("targets", "frozen", "words"),
    [
        (
            ["q_prj"],
            [],
            "'q_prj', which the model does not have; .* adapter: down_proj, gate_proj, k_proj, o_proj",
        ),
        (["embed_tokens"], [], "'embed_tokens', which is no linear layer of the backbone"),
        (["q_proj"], ["attention"], "'q_proj', which is frozen .*: down_proj, gate_proj, up_proj$"),
    ],
)
def test_layers_when_they_cannot_have_adapters_then_refused_with_those_that_can(
    tiny_folder: Path, targets: list[str], frozen: list[str], words: str
) -> None:
    settings = lora_settings(tiny_folder, "critic", RANK, lora_targets=targets, frozen=frozen)
    with pytest.raises(ConfigError, match=words):
        open_rank(settings, World.alone(), "cpu")


def test_mixture_when_it_gets_adapters_then_its_attention_does_and_its_experts_are_refused(
    tmp_path: Path,
) -> None:
    folder = write_mixture(tmp_path / "mixture")
    module = load_policy(folder, "float32").module
    adapters = adapt(module, lora_settings(folder, "actor", RANK))
    assert {layer.module.rsplit(".", 1)[-1] for layer in adapters.layers.values()} == {
        "q_proj", "k_proj", "v_proj", "o_proj",
    }  # fmt: skip
    rank = open_lora_rank(folder, "actor")
    answer(rank, Save(folder=str(tmp_path / "whole")))
    for target in ("experts", "gate_up_proj"):
        settings = lora_settings(folder, "actor", RANK, lora_targets=[target])
        with pytest.raises(ConfigError, match="one tensor of all experts"):
            adapt(load_policy(folder, "float32").module, settings)


def test_reference_when_it_is_what_the_run_starts_from_then_it_is_the_actor_without_adapters(
    tiny_folder: Path, sequences: TokenSequences
) -> None:
    request = ActorForward(sequences=sequences, temperature=0.8, with_reference=True)
    apart = open_rank(lora_settings(tiny_folder, "actor", 0, reference="initial"), World.alone(), "cpu")
    rank = open_lora_rank(tiny_folder, "actor", reference="initial")
    for _ in range(2):
        scored = answer(rank, request)
        assert np.abs(scored.logprobs - scored.reference_logprobs).max() > 1e-3  # type: ignore[union-attr]
        np.testing.assert_array_equal(
            scored.reference_logprobs,  # type: ignore[union-attr]
            answer(apart, request).reference_logprobs,  # type: ignore[union-attr]
        )
        train(rank, "actor", sequences)


def test_memory_when_adapters_train_then_only_they_are_counted(tiny_folder: Path) -> None:
    module = load_policy(tiny_folder, "float32").module
    settings = lora_settings(tiny_folder, "actor", RANK)
    with pytest.raises(ConfigError, match="does not fit"):
        check_fit(module, settings, 1, 30_000)
    adapt(module, settings)
    check_fit(module, settings, 1, 30_000)
