"""The optimizer that every training engine steps: AdamW, its groups of parameters, and their learning rates."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from asyppo_async.trainer.worker.critic_model import VALUE_HEAD
from asyppo_async.trainer.worker.learning_rate import LearningRate

_SHARE = "rate_share"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "step"


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


def moments_of(optimizer: torch.optim.Optimizer, weight: Tensor) -> Mapping[str, Tensor]:
    """By kind, each of the shape of the weight; nothing before its first step."""
    state = optimizer.state.get(weight, {})
    return {kind: state[kind] for kind in _MOMENTS if kind in state}


def moment_steps(optimizer: torch.optim.Optimizer) -> int:
    """Steps since the optimizer started, or started anew."""
    return max((int(state[_STEP]) for state in optimizer.state.values() if _STEP in state), default=0)


def begin_moments(optimizer: torch.optim.Optimizer, weights: Iterable[Tensor], num_steps: int) -> None:
    """Have moments to read others into, which are as old as `num_steps`."""
    for weight in weights:
        state = optimizer.state[weight]
        for kind in _MOMENTS:
            state.setdefault(kind, torch.zeros_like(weight, requires_grad=False))
        state[_STEP] = torch.tensor(float(num_steps), dtype=torch.float32, device=weight.device)
