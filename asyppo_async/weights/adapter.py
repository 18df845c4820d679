"""Adapters (LoRA) as publications: the names of their tensors, what fits a model, and their folder as peft writes it.

An adapter travels as weights do, in a session whose manifest names its tensors: for each adapted MODULE of the model
`base_model.model.MODULE.lora_A.weight` [rank, in] and `base_model.model.MODULE.lora_B.weight` [out, rank]. Its scale
(`lora_alpha / r`) is part of B on the wire, so nothing but tensors has to travel, and a delta is one of tensors too.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from asyppo_async.errors import WeightSyncError
from asyppo_async.weights.manifest import Dtype, Manifest, TensorSpec

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
_NO_ADAPTER = re.compile(r"(^|\.)(embed_tokens|lm_head|gate|experts)(\.|$)")
"""Embedding, head, routers and experts: adapted in other forms than two matrices, or not by every engine."""
_PLAIN: dict[str, object] = {
    "bias": "none",
    "modules_to_save": None,
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
}
"""What peft's settings have to be for an adapter that is two matrices a module, and one scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Of one version, ready to be sent."""

    manifest: Manifest
    tensors: Sequence[tuple[str, torch.Tensor]]
    """In manifest order, in the type of the manifest, with the scale in B."""


def read_adapter(folder: Path, dtype: Dtype) -> Adapter:
    """A folder that peft's `save_pretrained` wrote, as it is published in `dtype`.

    Raises:
        WeightSyncError: it is no such folder, or an adapter of another kind than LoRA with one rank and scale.
    """
    try:
        settings = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / _WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise WeightSyncError(f"{folder} holds no adapter that can be read: {error}") from error
    other = {
        key: settings[key] for key, plain in _PLAIN.items() if settings.get(key, plain) not in (plain, None)
    }
    if settings.get("peft_type") != "LORA" or other:
        raise WeightSyncError(
            f"{folder} holds an adapter of the kind {settings.get('peft_type')!r} with {other}; served is LoRA of one "
            "rank and scale for all modules, without biases"
        )
    rank, alpha = int(settings["r"]), float(settings["lora_alpha"])
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    scaled = [
        (
            name,
            (tensor.float() * scale if name.endswith(".lora_B.weight") else tensor).to(getattr(torch, dtype)),
        )
        for name, tensor in sorted(tensors.items())
    ]
    specs = [TensorSpec(name=name, shape=tuple(tensor.shape), dtype=dtype) for name, tensor in scaled]
    return Adapter(manifest=Manifest(tensors=tuple(specs)), tensors=scaled)


def write_adapter(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """The tensors of a publication as the folder of an adapter whose scale is 1."""
    whole = {name: tensor.clone() for name, tensor in tensors}
    rank = max(tensor.shape[0] for name, tensor in whole.items() if name.endswith(".lora_A.weight"))
    modules = {_module_of(name).rsplit(".", 1)[-1] for name in whole}
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(modules),
        "bias": "none",
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(whole, folder / _WEIGHTS)
    (folder / _CONFIG).write_text(json.dumps(settings), encoding="utf-8")


def adapter_without_effect(base: Manifest) -> list[tuple[str, torch.Tensor]]:
    """Rank 1 and zero, of the first module that takes an adapter."""
    for spec in base.tensors:
        if _takes_adapter(spec):
            module = spec.name.removesuffix(".weight")
            rows, columns = spec.shape
            return [
                (f"base_model.model.{module}.lora_A.weight", torch.zeros(1, columns)),
                (f"base_model.model.{module}.lora_B.weight", torch.zeros(rows, 1)),
            ]
    raise WeightSyncError("the model has no module that takes an adapter")


def adapted_layers(base: Manifest) -> list[str]:
    """Last names of the modules that take an adapter (`q_proj`, ...), sorted."""
    return sorted({spec.name.split(".")[-2] for spec in base.tensors if _takes_adapter(spec)})


def wrong_kind(senders: Manifest, max_rank: int) -> str:
    """What a person is told where whole weights meet a server of adapters, or the other way round; else nothing.

    `max_rank` of the adapters that the server takes; 0: it takes none.
    """
    adapters = any(_NAME.fullmatch(spec.name) for spec in senders.tensors)
    if not senders.tensors or adapters == bool(max_rank):
        return ""
    if adapters:
        return (
            "the sender publishes adapters, and this server takes whole weights: start it with --enable-lora and "
            '--max-lora-rank, or publish whole weights (weights.lora = "merged" in a run)'
        )
    return (
        f"{senders.tensors[0].name} is no tensor of an adapter: the sender publishes whole weights, and this server "
        'runs with --enable-lora; start it without, or publish adapters (weights.lora = "adapter" in a run)'
    )


def adapter_differences(adapter: Manifest, base: Manifest, max_rank: int) -> list[str]:
    """One line for each tensor of `adapter` that does not fit the model of `base`; none: it can be served."""
    weights = {spec.name: spec for spec in base.tensors if _takes_adapter(spec)}
    ranks = {rank for spec in adapter.tensors if (rank := _rank_of(spec)) is not None}
    names = {spec.name for spec in adapter.tensors}
    lines = [] if adapter.tensors else ["an adapter has at least one pair of tensors"]
    if len(ranks) > 1:
        lines.append(f"an adapter has one rank, got {sorted(ranks)}")
    for spec in adapter.tensors:
        found = _NAME.fullmatch(spec.name)
        weight = weights.get(f"{found['module']}.weight") if found else None
        if found is None:
            lines.append(
                f"{spec.name} is no tensor of an adapter (base_model.model.MODULE.lora_A.weight, or lora_B)"
            )
        elif weight is None:
            lines.append(
                f"{spec.name}: the model has no linear layer {found['module']} that takes an adapter"
            )
        elif (partner := _partner_of(found)) not in names:
            lines.append(f"{spec.name}: {partner} is missing")
        else:
            lines += _shape_differences(spec, weight, found["part"], max_rank)
    return lines


def _shape_differences(spec: TensorSpec, weight: TensorSpec, part: str, max_rank: int) -> list[str]:
    rank, rows, columns = _rank_of(spec), *weight.shape
    if rank is None or not 0 < rank <= max_rank:
        return [f"{spec.name} {list(spec.shape)}: ranks 1 to {max_rank} are served (--max-lora-rank)"]
    expected = TensorSpec(
        name=spec.name, shape=(rank, columns) if part == "A" else (rows, rank), dtype=weight.dtype
    )
    if spec != expected:
        return [
            f"{spec.name} is {list(spec.shape)} {spec.dtype}, needed is {list(expected.shape)} {expected.dtype}"
        ]
    return []


def _partner_of(found: re.Match[str]) -> str:
    """The name of the other one of the two matrices."""
    return f"base_model.model.{found['module']}.lora_{'B' if found['part'] == 'A' else 'A'}.weight"


def _rank_of(spec: TensorSpec) -> int | None:
    """None: not a tensor of an adapter."""
    found = _NAME.fullmatch(spec.name)
    if found is None or len(spec.shape) != 2:
        return None
    return spec.shape[0 if found["part"] == "A" else 1]


def _module_of(name: str) -> str:
    found = _NAME.fullmatch(name)
    if found is None:
        raise WeightSyncError(f"{name} is no tensor of an adapter")
    return found["module"]


def _takes_adapter(spec: TensorSpec) -> bool:
    return len(spec.shape) == 2 and spec.name.endswith(".weight") and not _NO_ADAPTER.search(spec.name)
