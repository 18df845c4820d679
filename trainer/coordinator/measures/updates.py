"""Optimizer steps of one group: losses, norms, ratios."""

import math
from collections.abc import Sequence

from asyppo_async.metrics import Metrics, known, mean_of
from asyppo_async.trainer.worker.messages import OptimizerStep, TrainResult


def update_metrics(name: str, update: TrainResult, *, clip_norm: float) -> Metrics:
    """Of one group's optimizer steps; those that were skipped count as such and for nothing else."""
    taken = [step for step in update.steps if not step.skipped]
    row = {
        f"{name}/loss": mean_of(step.loss for step in taken),
        f"{name}/grad_norm": mean_of(step.grad_norm for step in taken),
        f"{name}/clipped_share": mean_of(float(step.grad_norm > clip_norm) for step in taken),
        f"{name}/learning_rate": taken[-1].learning_rate if taken else float("nan"),
        f"{name}/optimizer_steps": float(len(taken)),
        f"{name}/skipped_steps": float(len(update.steps) - len(taken)),
        f"{name}/activation_bytes": float(update.activation_bytes),
        f"{name}/peak_bytes": float(update.peak_bytes),
    }
    return row | (_of_policy(taken) if name == "actor" else _of_parts(name, taken))


def clip_series(update: TrainResult) -> dict[str, list[float]]:
    """The actor's clip fractions of every optimizer step in turn, by side; NaN where nothing had weight."""
    return {
        "actor/clip_fraction_low_by_update": [step.clip_fraction_low for step in update.steps],
        "actor/clip_fraction_high_by_update": [step.clip_fraction_high for step in update.steps],
    }


def _of_policy(taken: Sequence[OptimizerStep]) -> Metrics:
    masked = [step.masked_clip_fraction for step in taken]
    row = known({"actor/masked_clip_fraction": mean_of(share for share in masked if not math.isnan(share))})
    return row | {
        "actor/entropy": mean_of(step.entropy for step in taken),
        "actor/clip_fraction_low": mean_of(step.clip_fraction_low for step in taken),
        "actor/clip_fraction_high": mean_of(step.clip_fraction_high for step in taken),
        "actor/clip_fraction_last": taken[-1].clip_fraction_low + taken[-1].clip_fraction_high
        if taken
        else float("nan"),
        "actor/ratio_mean": mean_of(step.ratio_mean for step in taken),
        "actor/ratio_p1": mean_of(step.ratio_p1 for step in taken),
        "actor/ratio_p99": mean_of(step.ratio_p99 for step in taken),
        "actor/ratio_max": max((step.ratio_max for step in taken), default=float("nan")),
        "actor/kl_proximal": mean_of(step.kl_proximal for step in taken),
        "actor/kl_proximal_k1": mean_of(step.kl_proximal_k1 for step in taken),
    }


def _of_parts(name: str, taken: Sequence[OptimizerStep]) -> Metrics:
    """Gradients: the mean over the steps, before clipping; weights: after the last one."""
    parts = [step.parts for step in taken if step.parts is not None]
    if not parts:
        return {}
    return {
        f"{name}/head_grad_norm": mean_of(part.head_gradient for part in parts),
        f"{name}/backbone_grad_norm": mean_of(part.backbone_gradient for part in parts),
        f"{name}/head_norm": parts[-1].head_weights,
        f"{name}/backbone_norm": parts[-1].backbone_weights,
    }
