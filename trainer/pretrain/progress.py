"""What a pretraining measures: losses, held-out explained variance by length, its two phases, and when it ends."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from asyppo_async.algorithms.calibration import explained_variance_by_length
from asyppo_async.algorithms.metrics import explained_variance_sums
from asyppo_async.algorithms.packed import spread
from asyppo_async.config.pool import PretrainSection
from asyppo_async.metrics import Metrics
from asyppo_async.trainer.coordinator.batch import Batch

WINDOW_STEPS = 20
"""Steps of the first and the last mean loss (S3AC's figures)."""


def constant_loss(batch: Batch) -> float:
    """1/2 Var(G) over tokens: the loss of a critic that knows the mean return and nothing else.

    The value loss falls in two phases (VC-PPO 3.2): down to this, while the range of values is learned, and below it,
    where knowledge of the responses begins.
    """
    returns = np.repeat(batch.shaped_rewards.astype(np.float64), batch.lengths)
    return float(returns.var() / 2)


def heldout_metrics(batch: Batch, values: NDArray[np.float32], edges: Sequence[int]) -> Metrics:
    """Of each critic, on responses to prompts that nobody trains on; `values` is [M, N]."""
    lengths = torch.from_numpy(batch.lengths)
    returns = spread(torch.from_numpy(batch.shaped_rewards), lengths)
    row: Metrics = {}
    for index, own in enumerate(torch.from_numpy(values)):
        sums = explained_variance_sums(returns, own)
        name = f"critic_{index}/heldout"
        row[f"{name}_explained_variance"] = sums.explained_variance
        row[f"{name}_bias"] = sums.bias
        row[f"{name}_loss"] = sums.mean_squared_error / 2
        for bucket, part in enumerate(explained_variance_by_length(returns, own, lengths, edges=edges)):
            up_to = str(edges[bucket]) if bucket < len(edges) else "longest"
            row[f"{name}_explained_variance_to_{up_to}"] = part.explained_variance
    known = [value for name, value in row.items() if name.endswith("heldout_explained_variance")]
    row["pretrain/heldout_explained_variance"] = statistics.fmean(known)
    return row


@dataclass(slots=True)
class StopRule:
    """Ends a pretraining whose held-out explained variance no longer rises."""

    settings: PretrainSection
    best: float = -math.inf
    best_step: int = 0

    def is_over(self, step: int, explained_variance: float) -> bool:
        """After the measurement of a step; NaN is no rise."""
        if explained_variance >= self.best + self.settings.stop_rise:
            self.best, self.best_step = explained_variance, step
        return step - self.best_step >= self.settings.stop_steps


@dataclass(slots=True)
class Progress:
    """Over a whole pretraining, of all critics together."""

    losses: list[float] = field(default_factory=list)
    constants: list[float] = field(default_factory=list)
    clipped: list[float] = field(default_factory=list)
    last_heldout: Mapping[str, float] = field(default_factory=dict)

    def add(self, row: Mapping[str, float], num_critics: int) -> None:
        """One step's row."""
        self.losses.append(statistics.fmean(row[f"critic_{index}/loss"] for index in range(num_critics)))
        self.clipped.append(
            statistics.fmean(row[f"critic_{index}/clipped_share"] for index in range(num_critics))
        )
        self.constants.append(row["pretrain/constant_loss"])
        heldout = {name: value for name, value in row.items() if "heldout" in name}
        self.last_heldout = heldout or self.last_heldout

    @property
    def knowledge_from_step(self) -> int | None:
        """The 1-based step from which the loss, as a mean over five steps, is below that of the best constant."""
        for end in range(5, len(self.losses) + 1):
            part = slice(end - 5, end)
            if statistics.fmean(self.losses[part]) < statistics.fmean(self.constants[part]):
                return end
        return None

    def row(self) -> dict[str, object]:
        """For the summary."""
        return {
            "pretraining_steps": len(self.losses),
            "loss_first_steps": statistics.fmean(self.losses[:WINDOW_STEPS]) if self.losses else None,
            "loss_last_steps": statistics.fmean(self.losses[-WINDOW_STEPS:]) if self.losses else None,
            "constant_loss": statistics.fmean(self.constants) if self.constants else None,
            "knowledge_from_step": self.knowledge_from_step,
            "clipped_share": statistics.fmean(self.clipped) if self.clipped else None,
            **self.last_heldout,
        }
