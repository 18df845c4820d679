"""Whether what training holds beside the weights will fit, before a step finds out."""

from pathlib import Path

import torch
from torch import nn

from asyppo_async.errors import ConfigError
from asyppo_async.trainer.worker.control import WorkerSettings

_MEMINFO = Path("/proc/meminfo")
_FLOAT32_BYTES = 4
_MOMENTS = 2
_GIB = 2**30


def state_bytes(num_trained: int, settings: WorkerSettings, num_ranks: int) -> int:
    """Of gradients, masters, Adam's moments and the moving average at one rank, weights not counted.

    Args:
        num_trained: parameters that train.
        settings: engine, ZeRO stage and type of the weights.
        num_ranks: that a partitioned state is cut over.
    """
    masters = 1 if settings.dtype == "bfloat16" else 0
    averages = 1 if settings.ema_decay > 0 else 0
    optimizer = num_trained * _FLOAT32_BYTES * (_MOMENTS + masters + averages)
    gradients = num_trained * _FLOAT32_BYTES
    if settings.backend == "plain":
        return optimizer + gradients
    cut_gradients = gradients // num_ranks if settings.zero_stage >= 2 else gradients
    return optimizer // num_ranks + cut_gradients


def free_bytes(device: torch.device) -> int | None:
    """That the device, or this machine, could still give; None: unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if not _MEMINFO.exists():
        return None
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def check_fit(module: nn.Module, settings: WorkerSettings, num_ranks: int, free: int | None) -> None:
    """Of one rank alone; ranks beside it on the same device need theirs as well.

    Raises:
        ConfigError: the state is larger than what is free, with both numbers and what to change.
    """
    num_trained = sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
    needed = state_bytes(num_trained, settings, num_ranks)
    if free is None or needed <= free:
        return
    raise ConfigError(
        f"{settings.role}.model does not fit: {num_trained:,} trained parameters need {needed / _GIB:.1f} GiB for "
        f"gradients and optimizer at each of {num_ranks} ranks, and {free / _GIB:.1f} GiB are free here; use "
        f"{settings.role}.backend = 'deepspeed' with zero_stage = 3 and more ranks, adapters "
        f"({settings.role}.lora_rank), or a smaller model"
    )
