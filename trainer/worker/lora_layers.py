"""The one home of peft: puts LoRA adapters into the linear layers of a loaded model, and writes its folder."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor, nn

from asyppo_async.errors import ConfigError
from asyppo_async.trainer.worker.control import WorkerSettings
from asyppo_async.trainer.worker.lora import NO_ADAPTERS, AdaptedLayer, Adapters
from asyppo_async.weights.checksum import checksum_of

logger = logging.getLogger(__name__)

_ADAPTER = "default"
_WEIGHTS_FILE = "adapter_model.safetensors"


def adapt(model: nn.Module, settings: WorkerSettings, *, prefix: str = "") -> Adapters:
    """Put the adapters of the settings into a model of transformers, in place; all of its own weights are frozen.

    B is 0, so the model computes what it did. A is drawn in float64 from the seed, so that every rank and every type
    gets the same numbers: uniform in +-1 / sqrt(in), as peft draws it. There is no dropout: the policy would differ
    from itself, and the first ratio from 1.

    Args:
        model: a policy, or the backbone of a critic; what is frozen already gets no adapter.
        settings: rank (0: nothing happens), alpha, targets, seed.
        prefix: of the model's parameters among those that the training engine has.

    Raises:
        ConfigError: a target is no linear layer of the model that trains; says which there are.
    """
    if settings.lora_rank == 0:
        return NO_ADAPTERS
    from peft import inject_adapter_in_model

    chosen = _chosen_layers(model, settings)
    inject_adapter_in_model(_peft_config(settings, chosen), model)
    model.eval()
    layers = {}
    generator = torch.Generator().manual_seed(settings.seed)
    for name in chosen:
        stem = f"{prefix}{name}"
        layers[f"{stem}.weight"] = AdaptedLayer(
            module=name,
            base=f"{stem}.base_layer.weight",
            down=f"{stem}.lora_A.{_ADAPTER}.weight",
            up=f"{stem}.lora_B.{_ADAPTER}.weight",
        )
        _draw(
            model.get_parameter(f"{name}.lora_A.{_ADAPTER}.weight"),
            model.get_parameter(f"{name}.lora_B.{_ADAPTER}.weight"),
            generator,
        )
    num_trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    num_frozen = sum(weight.numel() for weight in model.parameters()) - num_trained
    logger.info(
        "LoRA: rank %d in %d layers, %d parameters over a model of %d",
        settings.lora_rank,
        len(layers),
        num_trained,
        num_frozen,
    )
    return Adapters(
        layers=layers,
        rank=settings.lora_rank,
        alpha=settings.lora_alpha,
        targets=_short_targets(model, chosen, settings.lora_targets),
        base_checksum=_checksum_of_frozen(model),
    )


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within it the model computes what it does without its adapters.

    They count 0 times instead of being left out, so that an engine which gathers weights in the order in which they
    were used before finds them all.
    """
    from peft.tuners.lora import LoraLayer

    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    for layer in layers:
        layer.set_scale(_ADAPTER, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(_ADAPTER, 1.0)


def write_peft_folder(
    folder: Path, tensors: Mapping[str, Tensor], adapters: Adapters, settings: WorkerSettings
) -> None:
    """As peft's `save_pretrained`, for `PeftModel.from_pretrained` on the model that the run started from.

    Args:
        folder: made if it is not there.
        tensors: A and B of every layer by peft's names, in host memory, not scaled.
        adapters: what they are.
        settings: of the rank; its model is named as the base.
    """
    config = _peft_config(settings, adapters.targets)
    config.inference_mode = True
    config.base_model_name_or_path = settings.model
    config.task_type = "CAUSAL_LM" if settings.role == "actor" else "FEATURE_EXTRACTION"
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / _WEIGHTS_FILE, metadata={"format": "pt"})


def _peft_config(settings: WorkerSettings, targets: Sequence[str]) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=0.0,
        target_modules=list(targets),
        bias="none",
        init_lora_weights=True,
    )


def _chosen_layers(model: nn.Module, settings: WorkerSettings) -> list[str]:
    linear = _linear_layers(model)
    trained = [name for name, layer in linear.items() if layer.weight.requires_grad]
    there = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in trained})) or "none"
    wrong = [target for target in settings.lora_targets if not any(_ends(name, target) for name in trained)]
    if wrong or not trained:
        what = f"names {wrong[0]!r}, {_reason(model, wrong[0])}" if wrong else "is empty"
        raise ConfigError(
            f"{settings.role}.lora_targets {what}; linear layers of {settings.model} that can have an adapter: {there}"
        )
    if not settings.lora_targets:
        return trained
    return [name for name in trained if any(_ends(name, target) for target in settings.lora_targets)]


def _linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Of the backbone, by name; the head is not one of them."""
    embeddings = getattr(model, "get_output_embeddings", lambda: None)()
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and layer is not embeddings
    }


def _reason(model: nn.Module, target: str) -> str:
    """Why no linear layer that trains has this name."""
    if any(_ends(name, target) for name in _linear_layers(model)):
        return "which is frozen (critic.frozen)"
    parameters = [name.removesuffix(".weight") for name, _ in model.named_parameters()]
    if any(_ends(name, target) and ".experts." in f".{name}." for name in parameters) or target == "experts":
        return "which is one tensor of all experts of a mixture; adapters are for its other layers"
    if any(_ends(name, target) for name, _ in model.named_modules() if name):
        return (
            "which is no linear layer of the backbone (embeddings, head, norms and routers have no adapter)"
        )
    return "which the model does not have"


def _short_targets(model: nn.Module, chosen: Sequence[str], wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Ends of names that choose these layers and no others, as short as they can be."""
    last = tuple(sorted({name.rsplit(".", 1)[-1] for name in chosen}))
    others = {name for name, _ in model.named_modules()} - set(chosen)
    for targets in (wanted, last):
        if targets and not any(_ends(name, target) for name in others for target in targets):
            return targets
    return tuple(chosen)


def _ends(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


@torch.no_grad()
def _draw(down: Tensor, up: Tensor, generator: torch.Generator) -> None:
    uniform = torch.rand(down.shape, generator=generator, dtype=torch.float64) * 2 - 1
    down.copy_(uniform / math.sqrt(down.shape[1]))
    up.zero_()


def _checksum_of_frozen(model: nn.Module) -> str:
    """The adapters of a checkpoint belong to exactly these weights."""
    running = xxhash.xxh3_64()
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            running.update(f"{name}:{checksum_of(weight):x};".encode())
    return str(running.hexdigest())
