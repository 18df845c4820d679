"""A trainer that trains LoRA: it writes folders as peft does, and its model is the base with the adapter in it."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from asyppo_async.weights.adapter import read_adapter
from asyppo_async.weights.manifest import Manifest
from tests.integration.fleet.conftest import Reference

RANK, ALPHA = 4, 12
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def peft_folder(
    folder: Path, base: torch.nn.Module, seed: int, *, rank: int = RANK, **settings: object
) -> Path:
    """As peft's `save_pretrained`: random matrices of every linear layer."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in base.named_modules():
        if name.endswith(LINEAR):
            rows, columns = module.weight.shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = (
                torch.randn(rank, columns, generator=generator) * 0.1
            )
            tensors[f"base_model.model.{name}.lora_B.weight"] = (
                torch.randn(rows, rank, generator=generator) * 0.03
            )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    own = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": ALPHA,
        "target_modules": list(LINEAR),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(own | settings))
    return folder


class AdapterReference(Reference):
    """What is sent is the adapter; what the server's log-probs are compared with is the model with it."""

    def __init__(self, folder: Path, place: Path) -> None:
        """`place`: where its adapters are written."""
        super().__init__(folder, "float32")
        self._place = place
        self._base = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self._tensors: Sequence[tuple[str, torch.Tensor]] = ()
        self.manifest = Manifest(tensors=())
        self.learn(0)

    def learn(self, seed: int) -> None:
        """Another adapter, in the place of the one before."""
        folder = peft_folder(self._place / str(seed), self.model, seed)
        adapter = read_adapter(folder, "float32")
        self.manifest, self._tensors = adapter.manifest, adapter.tensors
        matrices = dict(adapter.tensors)
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                weight.copy_(self._base[name])
                stem = f"base_model.model.{name.removesuffix('.weight')}"
                if f"{stem}.lora_A.weight" in matrices:
                    weight.add_(matrices[f"{stem}.lora_B.weight"] @ matrices[f"{stem}.lora_A.weight"])

    def tensors(self, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
        assert [name for name, _ in self._tensors] == list(names)
        return list(self._tensors)
