"""Adapters as publications: read as peft wrote them, scaled, compared with the model, and written for the engine."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyppo_async.errors import WeightSyncError
from asyppo_async.weights.adapter import (
    adapter_differences,
    adapter_without_effect,
    read_adapter,
    write_adapter,
)
from asyppo_async.weights.manifest import Dtype, Manifest, TensorSpec

UP = "model.layers.0.mlp.up_proj"
A, B = f"base_model.model.{UP}.lora_A.weight", f"base_model.model.{UP}.lora_B.weight"


def manifest_of(tensors: dict[str, tuple[int, ...]], dtype: Dtype = "float32") -> Manifest:
    return Manifest(
        tensors=tuple(TensorSpec(name=name, shape=shape, dtype=dtype) for name, shape in tensors.items())
    )


BASE = manifest_of(
    {
        "model.embed_tokens.weight": (64, 8),
        "model.norm.weight": (8,),
        "model.layers.0.mlp.experts.0.up_proj.weight": (24, 8),
        f"{UP}.weight": (24, 8),
    }
)


def peft_folder(folder: Path, **settings: object) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {A: torch.randn(4, 8, generator=generator), B: torch.randn(24, 4, generator=generator)}
    save_file(tensors, folder / "adapter_model.safetensors")
    own = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["up_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(own | settings))
    return tensors


@pytest.mark.parametrize(("settings", "scale"), [({}, 1.5), ({"use_rslora": True}, 3.0)])
def test_adapter_when_read_then_its_scale_is_in_b(
    tmp_path: Path, settings: dict[str, object], scale: float
) -> None:
    tensors = peft_folder(tmp_path, **settings)
    adapter = read_adapter(tmp_path, "float32")
    read = dict(adapter.tensors)
    assert [spec.name for spec in adapter.manifest.tensors] == [A, B] == list(read)
    torch.testing.assert_close(read[B] @ read[A], scale * tensors[B] @ tensors[A])
    assert adapter_differences(adapter.manifest, BASE, 8) == []
    assert {tensor.dtype for _, tensor in read_adapter(tmp_path, "bfloat16").tensors} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"alpha_pattern": {"up_proj": 2}}, "alpha_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "'IA3'"),
    ],
)
def test_adapter_when_of_another_kind_then_refused(
    tmp_path: Path, settings: dict[str, object], words: str
) -> None:
    peft_folder(tmp_path, **settings)
    with pytest.raises(WeightSyncError, match=words):
        read_adapter(tmp_path, "float32")


def test_adapter_when_its_folder_is_broken_then_the_error_names_it(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match=f"{tmp_path} holds no adapter"):
        read_adapter(tmp_path, "float32")
    peft_folder(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"12")
    with pytest.raises(WeightSyncError, match=f"{tmp_path} holds no adapter"):
        read_adapter(tmp_path, "float32")


def test_adapter_when_written_for_an_engine_then_its_scale_is_1(tmp_path: Path) -> None:
    (tmp_path / "peft").mkdir()
    peft_folder(tmp_path / "peft")
    sent = dict(read_adapter(tmp_path / "peft", "float32").tensors)
    write_adapter(tmp_path / "engine", sent.items())
    settings = json.loads((tmp_path / "engine" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["target_modules"]) == (4, 4, ["up_proj"])
    written = load_file(tmp_path / "engine" / "adapter_model.safetensors")
    torch.testing.assert_close(written, sent, rtol=0, atol=0)
    torch.testing.assert_close(
        dict(read_adapter(tmp_path / "engine", "float32").tensors), sent, rtol=0, atol=0
    )


def test_adapter_without_effect_fits_the_model_and_adds_nothing() -> None:
    tensors = dict(adapter_without_effect(BASE))
    assert list(tensors) == [A, B]
    assert (tensors[B] @ tensors[A]).shape == (24, 8) and not (tensors[B] @ tensors[A]).any()
    with pytest.raises(WeightSyncError, match="no module that takes an adapter"):
        adapter_without_effect(manifest_of({"model.embed_tokens.weight": (64, 8)}))


EXPERT = "base_model.model.model.layers.0.mlp.experts.0.up_proj"


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "at least one pair"),
        ({A: (4, 8)}, f"{A}: {B} is missing"),
        ({A: (9, 8), B: (24, 9)}, "ranks 1 to 8 are served"),
        ({A: (4, 9), B: (24, 4)}, rf"{A} is \[4, 9\] float32, needed is \[4, 8\] float32"),
        ({A: (4, 8), B: (4, 24)}, "an adapter has one rank"),
        ({A: (4, 8), B: (24, 4, 1)}, "ranks 1 to 8"),
        ({UP + ".weight": (24, 8)}, "is no tensor of an adapter"),
        (
            {f"{EXPERT}.lora_A.weight": (4, 8), f"{EXPERT}.lora_B.weight": (24, 4)},
            "no linear layer .*experts",
        ),
    ],
)
def test_adapter_when_it_does_not_fit_the_model_then_the_difference_says_how(
    tensors: dict[str, tuple[int, ...]], words: str
) -> None:
    lines = adapter_differences(manifest_of(tensors), BASE, 8)
    assert re.search(words, "\n".join(lines))


def test_adapter_when_of_another_type_than_the_server_then_the_difference_says_so() -> None:
    (first, _) = adapter_differences(manifest_of({A: (4, 8), B: (24, 4)}, "bfloat16"), BASE, 8)
    assert first.endswith("needed is [4, 8] float32")
