"""The optimizer that every training engine steps: AdamW, its groups of parameters, and their learning rates."""

from collections.abc import Iterable

import torch
from torch import Tensor

from asyppo_async.trainer.worker.critic_model import VALUE_HEAD
from asyppo_async.trainer.worker.learning_rate import LearningRate

_SHARE = "rate_share"


def adamw(
    weights: Iterable[tuple[str, Tensor]], learning_rate: LearningRate, weight_decay: float
) -> torch.optim.AdamW:
    """Of named weights. Weight decay acts on matrices only; a value head has a learning rate of its own.

    The groups are one optimizer's, so that no schedule can miss one of them.
    """
    groups: dict[tuple[bool, bool], list[Tensor]] = {(False, True): []}
    for name, weight in weights:
        groups.setdefault((name.startswith(VALUE_HEAD), weight.dim() >= 2), []).append(weight)
    return torch.optim.AdamW(
        [
            {
                "params": members,
                "weight_decay": weight_decay if decayed else 0.0,
                _SHARE: learning_rate.head_share if of_head else 1.0,
            }
            for (of_head, decayed), members in groups.items()
        ],
        lr=learning_rate.peak,
        fused=True,
    )


def set_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Before each step; the head's follows in proportion."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group[_SHARE]
