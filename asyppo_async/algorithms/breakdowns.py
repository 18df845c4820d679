"""Shares of tokens by what they are: sign of advantage, age, clip side, and AsyPPO's two masks.

Negative-advantage stale tokens are the dangerous ones, so rejection is told apart by both. Legend: `T` packed
tokens.
"""

from dataclasses import dataclass

from torch import Tensor

from asyppo_async.algorithms.losses import TokenLoss
from asyppo_async.algorithms.packed import count_true


def share(marked: Tensor, among: Tensor) -> float:
    """Marked tokens among some, as a share; NaN if there are none."""
    total = count_true(among)
    return count_true(marked & among) / total if total else float("nan")


def masked_mean(terms: Tensor, among: Tensor) -> float:
    """Mean over some tokens (entropy with and without the filter, for one); NaN if there are none."""
    return float(terms.detach()[among].double().mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectionShares:
    """Share of rejected tokens among those with each property."""

    positive_advantage: float
    negative_advantage: float
    fresh: float
    stale: float
    stale_negative: float


def rejection_shares(
    rejected: Tensor, advantages: Tensor, staleness: Tensor, valid: Tensor
) -> RejectionShares:
    """Where the mismatch correction takes its tokens from.

    Args:
        rejected: [T] bool.
        advantages: [T]; what is not valid may hold NaN.
        staleness: [T] int versions.
        valid: [T] bool.
    """
    positive, negative = valid & (advantages > 0), valid & (advantages < 0)
    fresh, stale = valid & (staleness == 0), valid & (staleness > 0)
    return RejectionShares(
        positive_advantage=share(rejected, positive),
        negative_advantage=share(rejected, negative),
        fresh=share(rejected, fresh),
        stale=share(rejected, stale),
        stale_negative=share(rejected, stale & negative),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipShares:
    """Share of tokens that the trust region acted on."""

    low: float
    high: float


def clip_shares(loss: TokenLoss, counted: Tensor) -> ClipShares:
    """Low and high side apart, over the counted tokens; for CISPO the share of clamped weights."""
    return ClipShares(low=share(loss.clipped_low, counted), high=share(loss.clipped_high, counted))


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskOverlaps:
    """Of AsyPPO's advantage mask and entropy filter, as shares of all valid tokens."""

    advantage_masked: float
    entropy_filtered: float
    both: float


def mask_overlaps(advantage_keep: Tensor, entropy_keep: Tensor, valid: Tensor) -> MaskOverlaps:
    """How the masks fall together; "both" is 0 as long as the two shares sum to at most 1."""
    masked, filtered = ~advantage_keep, ~entropy_keep
    return MaskOverlaps(
        advantage_masked=share(masked, valid),
        entropy_filtered=share(filtered, valid),
        both=share(masked & filtered, valid),
    )


def enough_effective_samples(effective_sample_size: float, floor: float) -> bool:
    """Whether a step is worth taking: false under the floor and for NaN (no tokens). A falling ESS announces
    collapse.
    """
    return effective_sample_size >= floor


def masked_correlation(first: Tensor, second: Tensor, valid: Tensor) -> float:
    """Pearson correlation over valid tokens (position against advantage, std against |gradient|, ...)."""
    everything = bool(valid.all())
    a, b = (tensor.double() if everything else tensor[valid].double() for tensor in (first, second))
    if len(a) < 2:
        return float("nan")
    a, b = a - a.mean(), b - b.mean()
    return float((a @ b) / ((a @ a).sqrt() * (b @ b).sqrt()))
