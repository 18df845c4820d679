"""The optimizer steps of one training request, the same loop for actor and critics.

Every rank goes through the same steps and calls the same collectives, also where it has no sequence of a mini-batch.
What decides (nothing has weight, the loss is not finite) is decided on sums over all ranks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyppo_async.errors import TrainingDiverged
from asyppo_async.trainer.worker.backend.protocol import Backend
from asyppo_async.trainer.worker.messages import MiniBatches, OptimizerStep
from asyppo_async.trainer.worker.packing import Int64Array, MicroBatch, RowLayout, micro_batches
from asyppo_async.trainer.worker.world import World
from asyppo_async.types import TokenSequences


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSums:
    """What one micro-batch adds to the figures of its step."""

    loss: float = 0.0
    num_tokens: float = 0.0
    entropy: float = 0.0
    num_entropy_tokens: float = 0.0
    num_clipped_low: float = 0.0
    num_clipped_high: float = 0.0
    ratio: float = 0.0
    kl: float = 0.0
    ratio_max: float = -math.inf

    def __add__(self, other: "TokenSums") -> "TokenSums":
        sums = {
            field.name: getattr(self, field.name) + getattr(other, field.name)
            for field in fields(self)
            if field.name != "ratio_max"
        }
        return TokenSums(**sums, ratio_max=max(self.ratio_max, other.ratio_max))


LossOf = Callable[[MicroBatch, int], tuple[Tensor, TokenSums]]
"""Loss (already divided by the denominator of the optimizer step whose index is given) and figures of a micro-batch."""


class Stepper:
    """Goes through mini-batches; remembers over a run how often a step was not finite."""

    def __init__(
        self, backend: Backend, world: World, *, micro_batch_tokens: int, non_finite_budget: int
    ) -> None:
        self._backend = backend
        self._world = world
        self._micro_batch_tokens = micro_batch_tokens
        self._non_finite_budget = non_finite_budget
        self._num_non_finite = 0

    def run(
        self,
        sequences: TokenSequences,
        layout: RowLayout,
        mini_batches: MiniBatches,
        *,
        has_weight: NDArray[np.bool_],
        loss_of: LossOf,
    ) -> tuple[OptimizerStep, ...]:
        """All optimizer steps in turn.

        Args:
            sequences: of this rank's shard.
            layout: of the same sequences.
            mini_batches: indices into the shard; denominators are global.
            has_weight: [B] which sequences can move the gradient at all; the others are not even computed.
            loss_of: see `LossOf`.

        Raises:
            TrainingDiverged: more steps than the budget allows were not finite.
        """
        steps = []
        ends = mini_batches.sizes.astype(np.int64).cumsum()
        for index, (end, size) in enumerate(zip(ends, mini_batches.sizes, strict=True)):
            chosen = mini_batches.sequence_indices[end - size : end].astype(np.int64)
            steps.append(self._step(sequences, layout, chosen[has_weight[chosen]], index, loss_of))
        return tuple(steps)

    def forget_moments(self) -> None:
        """Let the optimizer start anew."""
        self._backend.forget_moments()

    def _step(
        self,
        sequences: TokenSequences,
        layout: RowLayout,
        chosen: Int64Array,
        index: int,
        loss_of: LossOf,
    ) -> OptimizerStep:
        sums = TokenSums()
        for batch in micro_batches(sequences, layout, chosen, self._micro_batch_tokens):
            loss, batch_sums = loss_of(batch, index)
            self._backend.backward(loss)
            sums += batch_sums
        sums = self._over_ranks(sums)
        learning_rate = self._backend.learning_rate
        if sums.num_tokens + sums.num_entropy_tokens == 0:
            self._backend.discard()
            return _report(sums, grad_norm=0.0, learning_rate=learning_rate, skipped=True)
        if not math.isfinite(sums.loss):
            self._backend.discard()
            self._count_non_finite(f"the loss is {sums.loss}")
            return _report(sums, grad_norm=math.nan, learning_rate=learning_rate, skipped=True)
        outcome = self._backend.step()
        if not outcome.applied:
            self._count_non_finite(f"the gradient's norm is {outcome.grad_norm}")
        return _report(
            sums,
            grad_norm=outcome.grad_norm,
            learning_rate=outcome.learning_rate,
            skipped=not outcome.applied,
        )

    def _count_non_finite(self, what: str) -> None:
        self._num_non_finite += 1
        if self._num_non_finite > self._non_finite_budget:
            raise TrainingDiverged(
                f"{what}, in optimizer step number {self._num_non_finite} of this run that is not finite; "
                f"non_finite_budget allows {self._non_finite_budget}: lower the learning rate"
            )

    def _over_ranks(self, sums: TokenSums) -> TokenSums:
        if self._world.size == 1:
            return sums
        names = [field.name for field in fields(sums) if field.name != "ratio_max"]
        totals = torch.tensor([getattr(sums, name) for name in names], dtype=torch.float64)
        self._world.sum_in_place([totals])
        maximum = torch.tensor([sums.ratio_max], dtype=torch.float64)
        self._world.max_in_place(maximum)
        return TokenSums(**dict(zip(names, totals.tolist(), strict=True)), ratio_max=float(maximum))


def sequences_with(weights: NDArray[np.float32] | NDArray[np.bool_], layout: RowLayout) -> NDArray[np.bool_]:
    """[B] which sequences have a token whose weight is not exactly 0; NaN counts as weight."""
    ends = layout.response_starts + layout.response_lengths
    counts = np.concatenate([[0], np.cumsum(weights != 0)])
    return np.asarray(counts[ends] > counts[layout.response_starts])


def _report(sums: TokenSums, *, grad_norm: float, learning_rate: float, skipped: bool) -> OptimizerStep:
    def mean(total: float, count: float) -> float:
        return total / count if count else math.nan

    return OptimizerStep(
        loss=sums.loss,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        skipped=skipped,
        num_tokens=int(sums.num_tokens),
        entropy=mean(sums.entropy, sums.num_entropy_tokens),
        clip_fraction_low=mean(sums.num_clipped_low, sums.num_tokens),
        clip_fraction_high=mean(sums.num_clipped_high, sums.num_tokens),
        ratio_mean=mean(sums.ratio, sums.num_tokens),
        ratio_max=sums.ratio_max if sums.num_tokens else math.nan,
        kl_proximal=mean(sums.kl, sums.num_tokens),
    )
