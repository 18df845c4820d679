"""Masks of the policy loss that look at the advantage or at the whole batch: M2PO, OPSM, and GEPO's entropy
scaling.

Legend: `B` responses, `T` packed tokens. Constants: no gradient.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Literal

import torch
from torch import Tensor

from asyppo_async.algorithms.packed import segment_mean


def m2po_keep(
    log_ratio: Tensor,
    *,
    threshold: float,
    advantages: Tensor | None = None,
    candidates: Literal["trust_region", "all"] = "trust_region",
    strict: bool = False,
    valid: Tensor | None = None,
) -> Tensor:
    """Drop the largest |log ratio| until mean(log ratio^2) of the rest is at most the threshold, [T] bool.

    (M2PO 2510.01161.) Of equal sizes the earlier flat index is dropped first.

    Args:
        log_ratio: [T].
        threshold: tau (.04).
        advantages: [T]; needed for "trust_region".
        candidates: "trust_region" considers tokens whose ratio has moved the way the advantage pushes (A > 0
            and r > 1, A < 0 and r < 1), as the paper; "all" every valid token, as AReaL (on log(mu /
            pi_prox)).
        strict: the rest must be below the threshold (AReaL), not at most.
        valid: [T] bool; the rest is neither considered nor kept.
    """
    logs = log_ratio.detach().double()
    everything = torch.ones_like(logs, dtype=torch.bool) if valid is None else valid
    considered = everything
    if candidates == "trust_region":
        if advantages is None:
            raise ValueError("M2PO over trust-region tokens needs advantages, got None")
        considered = everything & (logs * advantages.detach() > 0)
    squares = logs[considered].square()
    order = torch.argsort(squares, descending=True, stable=True)
    remaining = torch.arange(squares.numel(), 0, -1)
    means_of_rest = squares[order].flip(0).cumsum(0).flip(0) / remaining
    dropped = means_of_rest >= threshold if strict else means_of_rest > threshold
    chosen = torch.ones(squares.numel(), dtype=torch.bool)
    chosen[order[: int(dropped.sum())]] = False
    return everything.clone().masked_scatter_(considered, chosen)


def opsm_keep(
    advantages: Tensor,
    behaviour_log_ratio: Tensor,
    lengths: Tensor,
    *,
    threshold: float,
    valid: Tensor | None = None,
) -> Tensor:
    """Keep a response if A >= 0 or mean_t(log mu - log pi) <= threshold, [B] bool. (DeepSeek-V3.2's
    off-policy mask.)

    Args:
        advantages: [B].
        behaviour_log_ratio: [T] log pi - log mu.
        lengths: [B].
        threshold: delta.
        valid: [T] bool.
    """
    divergence = -segment_mean(behaviour_log_ratio.detach(), lengths, valid)
    return (advantages >= 0) | (divergence <= threshold)


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyTracker:
    """Running mean and variance of the group entropy; a new one after each batch."""

    mean: float
    variance: float

    @property
    def std(self) -> float:
        return sqrt(self.variance)


def track_entropy(tracker: EntropyTracker | None, entropies: Tensor, *, rate: float) -> EntropyTracker:
    """Exponential moving average over batches: new = (1 - rate) old + rate * batch; the first batch starts
    it.

    Args:
        tracker: None before the first batch.
        entropies: one per group (or per response, if all groups are of one size).
        rate: gamma (.01).
    """
    exact = entropies.detach().double()
    mean, variance = float(exact.mean()), float(exact.var(correction=0))
    if tracker is None:
        return EntropyTracker(mean=mean, variance=variance)
    return EntropyTracker(
        mean=(1 - rate) * tracker.mean + rate * mean, variance=(1 - rate) * tracker.variance + rate * variance
    )


def gepo_entropy_scale(
    advantages: Tensor,
    group_entropies: Tensor,
    tracker: EntropyTracker,
    *,
    low_width: float,
    high_width: float,
    low_factor: float,
    high_factor: float,
) -> Tensor:
    """Advantages scaled by the entropy of their group, [B]. (GEPO 2607.16850.)

        A > 0 and H_g < mean - low_width std:    low_factor A       (do not sharpen what is sharp)
        A < 0 and H_g > mean + high_width std:   high_factor A      (do not flatten what is flat)

    Args:
        advantages: [B].
        group_entropies: [B], `sequence_losses.group_entropy`.
        tracker: from earlier batches.
        low_width: in standard deviations (.2).
        high_width: in standard deviations (.3).
        low_factor: alpha_low (.5).
        high_factor: alpha_high (.2).
    """
    low = group_entropies < tracker.mean - low_width * tracker.std
    high = group_entropies > tracker.mean + high_width * tracker.std
    factor = torch.ones_like(advantages)
    factor = torch.where((advantages > 0) & low, torch.full_like(factor, low_factor), factor)
    factor = torch.where((advantages < 0) & high, torch.full_like(factor, high_factor), factor)
    return advantages * factor
