"""Names of the checkpoint against parameters of the loaded model: families whose experts are fused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.core_model_loading import Interleave, WeightConverter

from asyppo_async.errors import ConfigError
from asyppo_async.trainer.worker.backend.plain import PlainBackend
from asyppo_async.trainer.worker.control import ComputeDtype
from asyppo_async.trainer.worker.learning_rate import LearningRate
from asyppo_async.trainer.worker.model import load_policy
from asyppo_async.trainer.worker.names import CheckpointNames
from asyppo_async.trainer.worker.world import World
from asyppo_async.weights.manifest import leaf_module, manifest_of_checkpoint
from tests.unit.worker.learners import TINY_SIZES

SQUARE = {"moe_intermediate_size": 16, "num_experts": 11, "norm_topk_prob": True}
"""Experts as wide as the model: a transposed one has the right shape. More than ten: 10 comes before 2 as text."""


def families() -> dict[str, PreTrainedModel]:
    torch.manual_seed(3)
    sizes = {**TINY_SIZES, "num_experts_per_tok": 2}
    return {
        "qwen3_moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **SQUARE)),
        "qwen3_moe_tied_some_dense": Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**sizes, **SQUARE, tie_word_embeddings=True, mlp_only_layers=[0])
        ),
        "qwen2_moe_shared_expert": Qwen2MoeForCausalLM(
            Qwen2MoeConfig(**sizes, **SQUARE, shared_expert_intermediate_size=8)
        ),
        "mixtral": MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=3)),
        "olmoe": OlmoeForCausalLM(OlmoeConfig(**sizes, num_experts=3)),
        "fused_on_disk": Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **SQUARE)),
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", sorted(families()))
def test_tensors_of_a_loaded_mixture_are_those_of_its_checkpoint_bit_for_bit_and_views(
    family: str, dtype: ComputeDtype, tmp_path: Path
) -> None:
    model = families()[family].to(getattr(torch, dtype))
    model.save_pretrained(tmp_path, save_original_format=family != "fused_on_disk")
    module = load_policy(tmp_path, dtype).module
    names = CheckpointNames(module)
    on_disk = load_file(tmp_path / "model.safetensors")
    manifest = names.together(manifest_of_checkpoint(tmp_path, "float32"))
    assert {spec.name: spec.shape for spec in manifest.tensors} == names.shapes
    assert names.num_parameters == sum(tensor.numel() for tensor in on_disk.values())

    order = [spec.name for spec in manifest.tensors]
    parameters = names.parameters(order)
    assert len(parameters) == len(set(parameters)) == len(dict(module.named_parameters()))
    got = dict(names.tensors(order, plain(module).full_tensors(parameters)))
    assert got.keys() == on_disk.keys()
    owned = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    for name, tensor in on_disk.items():
        assert torch.equal(got[name], tensor), name
        assert got[name].untyped_storage().data_ptr() in owned, name


def plain(module: nn.Module) -> PlainBackend:
    return PlainBackend(
        module,
        module,
        world=World.alone(),
        learning_rate=LearningRate(peak=1, warmup_steps=0),
        weight_decay=0,
        max_grad_norm=1,
    )


def test_order_of_the_wire_keeps_leaf_modules_of_the_engine_whole_and_each_parameter_in_one_piece(
    tmp_path: Path,
) -> None:
    families()["qwen3_moe"].save_pretrained(tmp_path)
    names = CheckpointNames(load_policy(tmp_path, "float32").module)
    plainly = manifest_of_checkpoint(tmp_path, "float32")
    together = names.together(plainly)
    assert not plainly.difference(together) and plainly != together
    modules = [leaf_module(spec.name) for spec in together.tensors]
    assert modules == [leaf_module(spec.name) for spec in plainly.tensors]
    # As the plain order has it, the two parameters of a layer's experts would be gathered once for each expert.
    assert len(names.parameters([spec.name for spec in plainly.tensors])) > 2 * 11


def test_views_of_a_parameter_that_lies_inside_a_larger_buffer_see_their_own_elements(tmp_path: Path) -> None:
    families()["qwen3_moe"].save_pretrained(tmp_path)
    module = load_policy(tmp_path, "float32").module
    names = CheckpointNames(module)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    parameter = dict(module.named_parameters())[name].detach()
    # As ZeRO 1 and 2 hold their parameters.
    flat = torch.full((parameter.numel() + 7,), torch.nan)
    inside = flat[7:].view(parameter.shape).copy_(parameter)
    wanted = [f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in (10, 2)]
    on_disk = load_file(tmp_path / "model.safetensors")
    for checkpoint_name, tensor in names.tensors(wanted, [(name, inside)]):
        assert torch.equal(tensor, on_disk[checkpoint_name])


def test_tensor_that_is_no_view_of_a_parameter_is_refused_by_name(tmp_path: Path) -> None:
    families()["qwen3_moe"].save_pretrained(tmp_path)
    module = load_policy(tmp_path, "float32").module
    module._weight_conversions = [
        WeightConverter("mlp.gate.weight", "mlp.gate.weight", operations=[Interleave(dim=1)])
    ]
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.gate\.weight cannot be published"):
        CheckpointNames(module)
