"""Whether what training holds beside the weights will fit, before a step finds out."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from asyppo_async.errors import ConfigError
from asyppo_async.trainer.worker.control import Footprint, WorkerSettings

_MEMINFO = Path("/proc/meminfo")
_FLOAT32_BYTES = 4
_MOMENTS = 2
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Of gradients, masters, Adam's moments and the moving average at one rank, weights not counted."""

    device: int
    host: int = 0
    """What `offload.optimizer = "cpu"` keeps in host memory."""


def state_bytes(num_trained: int, settings: WorkerSettings, num_ranks: int) -> StateBytes:
    """What training holds beside the weights.

    Args:
        num_trained: parameters that train.
        settings: engine, ZeRO stage, type of the weights, and what is offloaded.
        num_ranks: that a partitioned state is cut over.
    """
    masters = 1 if settings.dtype == "bfloat16" else 0
    averages = 1 if settings.ema_decay > 0 else 0
    optimizer = num_trained * _FLOAT32_BYTES * (_MOMENTS + masters + averages)
    gradients = num_trained * _FLOAT32_BYTES
    if settings.backend == "plain":
        return StateBytes(device=optimizer + gradients)
    if settings.offload.optimizer != "none":
        # Masters, gradients and moments of this rank's part, float32 weights' masters included.
        return StateBytes(
            device=0, host=num_trained * _FLOAT32_BYTES * (_MOMENTS + 2 + averages) // num_ranks
        )
    cut_gradients = gradients // num_ranks if settings.zero_stage >= 2 else gradients
    return StateBytes(device=optimizer // num_ranks + cut_gradients)


def free_bytes(device: torch.device) -> int | None:
    """What the device, or this machine, could still give; None: unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if not _MEMINFO.exists():
        return None
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def check_fit(
    module: nn.Module,
    settings: WorkerSettings,
    num_ranks: int,
    free: int | None,
    free_on_host: int | None = None,
) -> StateBytes:
    """Of one rank alone; ranks beside it on the same device need theirs as well.

    Returns:
        what the rank will hold.

    Raises:
        ConfigError: the state is larger than what is free, with both numbers and what to change.
    """
    num_trained = sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
    state = state_bytes(num_trained, settings, num_ranks)
    for needed, there, where in ((state.device, free, "here"), (state.host, free_on_host, "in host memory")):
        if there is not None and needed > there:
            raise ConfigError(
                f"{settings.role}.model does not fit: {num_trained:,} trained parameters need {needed / _GIB:.1f} GiB "
                f"for gradients and optimizer at each of {num_ranks} ranks, and {there / _GIB:.1f} GiB are free "
                f"{where}; use {settings.role}.backend = 'deepspeed' with zero_stage = 3 and more ranks, "
                f"{settings.role}.offload.optimizer = 'cpu' where a GPU is what is full, adapters "
                f"({settings.role}.lora_rank), or a smaller model"
            )
    return state


def footprint_of(device: str, free: int | None, modules: Sequence[nn.Module], state: StateBytes) -> Footprint:
    """What a rank tells the coordinator, which knows who shares its device.

    Weights that an engine will partition count whole: every rank loads all of them.
    """
    weights = {id(weight): weight for module in modules for weight in module.parameters()}
    kind = torch.device(device)
    name = device
    if kind.type == "cuda":
        # Processes may see different parts of a machine under the same names.
        name = str(getattr(torch.cuda.get_device_properties(kind), "uuid", device))
    return Footprint(
        device=f"{name} of {socket.gethostname()}",
        on_host=kind.type == "cpu",
        free_bytes=free,
        weight_bytes=sum(weight.numel() * weight.element_size() for weight in weights.values()),
        state_bytes=state.device,
    )
