"""The optimizer steps of one training request, the same loop for actor and critics.

Every rank goes through the same steps and calls the same collectives, also where it has no sequence of a mini-batch.
What decides (nothing has weight, the loss is not finite) is decided on sums over all ranks.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyppo_async.algorithms.ratio_counts import no_counts, ratio_quantile
from asyppo_async.errors import TrainingDiverged
from asyppo_async.trainer.worker.backend.protocol import Backend
from asyppo_async.trainer.worker.memory import ActivationCount, forget_peak, peak_bytes
from asyppo_async.trainer.worker.messages import MiniBatches, OptimizerStep, PartNorms, TrainResult
from asyppo_async.trainer.worker.packing import Cutting, Int64Array, MicroBatch, RowLayout
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
    log_ratio: float = 0.0
    num_masked: float = 0.0
    num_masked_clipped: float = 0.0
    ratio_max: float = -math.inf
    ratio_counts: Tensor = field(default_factory=no_counts)
    """[K] of `ratio_counts`."""

    def __add__(self, other: "TokenSums") -> "TokenSums":
        sums = {name: getattr(self, name) + getattr(other, name) for name in _summed()}
        return TokenSums(
            **sums,
            ratio_max=max(self.ratio_max, other.ratio_max),
            ratio_counts=self.ratio_counts + other.ratio_counts,
        )


def _summed() -> list[str]:
    """Figures that are plain sums."""
    return [item.name for item in fields(TokenSums) if item.name not in ("ratio_max", "ratio_counts")]


LossOf = Callable[[MicroBatch, int], tuple[Tensor, TokenSums]]
"""Loss (already divided by the denominator of the optimizer step whose index is given) and figures of a micro-batch."""


class Stepper:
    """Goes through mini-batches; remembers over a run how often a step was not finite."""

    def __init__(self, backend: Backend, world: World, *, cutting: Cutting, non_finite_budget: int) -> None:
        self._backend = backend
        self._device = backend.device
        self._world = world
        self.cutting = cutting
        """How every request to this rank is cut."""
        self._non_finite_budget = non_finite_budget
        self.num_non_finite = 0
        """Optimizer steps of the run that were skipped because loss or gradient was not finite."""

    def run(
        self,
        sequences: TokenSequences,
        layout: RowLayout,
        mini_batches: MiniBatches,
        *,
        has_weight: NDArray[np.bool_],
        loss_of: LossOf,
        idle_loss: Callable[[], Tensor],
        within: Callable[[MicroBatch], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> TrainResult:
        """All optimizer steps in turn.

        Args:
            sequences: of this rank's shard.
            layout: of the same sequences.
            mini_batches: indices into the shard; denominators are global.
            has_weight: [B] which sequences can move the gradient at all; the others are not even computed.
            loss_of: see `LossOf`.
            idle_loss: a loss without gradient, for a rank that has no rows while its peers have.
            within: what forward and backward of a micro-batch happen in; a backward may run the forward again.

        Raises:
            TrainingDiverged: more steps than the budget allows were not finite.
        """
        started_s = time.perf_counter()
        forget_peak(self._device)
        pass_ = _Pass(sequences=sequences, layout=layout, loss_of=loss_of, within=within)
        ends = mini_batches.sizes.astype(np.int64).cumsum()
        chosen = [
            mini_batches.sequence_indices[end - size : end].astype(np.int64)
            for end, size in zip(ends, mini_batches.sizes, strict=True)
        ]
        weighted = [rows[has_weight[rows]] for rows in chosen]
        num_idle = self.num_idle([len(self.cutting.plan(layout.input_lengths[rows])) for rows in weighted])
        steps = []
        for index, (rows, idle) in enumerate(zip(weighted, num_idle, strict=True)):
            for _ in range(idle):
                self._backend.backward(idle_loss())
            steps.append(self._step(pass_, rows, index))
        if not all(step.skipped for step in steps):
            self._backend.update_average()
        return TrainResult(
            steps=tuple(steps),
            compute_s=time.perf_counter() - started_s,
            activation_bytes=pass_.activations.num_bytes,
            peak_bytes=peak_bytes(self._device),
        )

    def num_idle(self, num_micro_batches: Sequence[int]) -> list[int]:
        """How many forwards (and backwards) without rows this rank makes beside its own, for each of several steps.

        Where weights or gradients are partitioned a forward and a backward are collectives, so all ranks make as many
        as the one with the most rows.
        """
        own = torch.tensor(num_micro_batches, dtype=torch.int64)
        most = own.clone()
        if self._backend.collective:
            self._world.max_in_place(most)
        return [int(number) for number in most - own]

    def forget_moments(self) -> None:
        """Let the optimizer start anew."""
        self._backend.forget_moments()

    def _step(self, pass_: "_Pass", chosen: Int64Array, index: int) -> OptimizerStep:
        sums = TokenSums()
        for batch in self.cutting.micro_batches(pass_.sequences, pass_.layout, chosen):
            with pass_.within(batch):
                # The first batch is counted and stands for all, which are planned to be as large.
                with nullcontext() if pass_.activations.num_bytes else pass_.activations.counting():
                    loss, batch_sums = pass_.loss_of(batch, index)
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
            parts=outcome.parts,
        )

    def _count_non_finite(self, what: str) -> None:
        self.num_non_finite += 1
        if self.num_non_finite > self._non_finite_budget:
            raise TrainingDiverged(
                f"{what}, in optimizer step number {self.num_non_finite} of this run that is not finite; "
                f"non_finite_budget allows {self._non_finite_budget}: lower the learning rate"
            )

    def _over_ranks(self, sums: TokenSums) -> TokenSums:
        if self._world.size == 1:
            return sums
        names = _summed()
        totals = torch.tensor([getattr(sums, name) for name in names], dtype=torch.float64)
        counts = sums.ratio_counts.clone()
        self._world.sum_in_place([totals, counts])
        maximum = torch.tensor([sums.ratio_max], dtype=torch.float64)
        self._world.max_in_place(maximum)
        return TokenSums(
            **dict(zip(names, totals.tolist(), strict=True)), ratio_max=float(maximum), ratio_counts=counts
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """What the micro-batches of one request have in common."""

    sequences: TokenSequences
    layout: RowLayout
    loss_of: LossOf
    within: Callable[[MicroBatch], AbstractContextManager[None]]
    activations: ActivationCount = field(default_factory=ActivationCount)


def sequences_with(weights: NDArray[np.float32] | NDArray[np.bool_], layout: RowLayout) -> NDArray[np.bool_]:
    """[B] which sequences have a token whose weight is not exactly 0; NaN counts as weight."""
    ends = layout.response_starts + layout.response_lengths
    counts = np.concatenate([[0], np.cumsum(weights != 0)])
    return np.asarray(counts[ends] > counts[layout.response_starts])


def _report(
    sums: TokenSums,
    *,
    grad_norm: float,
    learning_rate: float,
    skipped: bool,
    parts: PartNorms | None = None,
) -> OptimizerStep:
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
        kl_proximal_k1=mean(-sums.log_ratio, sums.num_tokens),
        ratio_p1=ratio_quantile(sums.ratio_counts, 0.01),
        ratio_p99=ratio_quantile(sums.ratio_counts, 0.99),
        masked_clip_fraction=mean(sums.num_masked_clipped, sums.num_masked),
        parts=parts,
    )
