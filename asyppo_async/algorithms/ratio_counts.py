"""Percentiles of a ratio whose tokens lie on many ranks: counts per bin of its logarithm, which may be added.

A percentile itself may not be: that of the whole does not follow from those of the parts. The bins are
geometric in |log ratio|, on both sides of 0, so that a ratio of 1.0001 is told from one of 1.0002 as well as 2
from 4: a percentile is right to 0.9 % of its logarithm. Legend: `T` packed tokens, `K` bins.
"""

from math import ceil, exp, floor, log, nan

import torch
from torch import Tensor

from asyppo_async.algorithms.mismatch import LOG_RATIO_LIMIT

SMALLEST_LOG = 1e-6
"""|log ratio| below it is 0: float32 log-probs do not resolve it."""
BINS_A_SIDE = 1000
GROWTH = (LOG_RATIO_LIMIT / SMALLEST_LOG) ** (1 / BINS_A_SIDE)
"""Of |log ratio| from one bin to the next (1.017)."""
NUM_BINS = 2 * BINS_A_SIDE + 1


def no_counts() -> Tensor:
    """Of no tokens, [K]."""
    return torch.zeros(NUM_BINS, dtype=torch.int64)


def count_log_ratios(log_ratio: Tensor) -> Tensor:
    """Tokens in each bin, [T] -> [K] int64 on the host, from the most negative log ratio to the largest.

    Beyond +-20 is the last bin; logs must be finite.
    """
    size = log_ratio.detach().double().abs()
    steps = (size / SMALLEST_LOG).clamp(min=1.0).log().div_(log(GROWTH)).floor_().clamp_(max=BINS_A_SIDE - 1)
    place = torch.where(size < SMALLEST_LOG, 0.0, (steps + 1).copysign(log_ratio.detach()))
    return torch.bincount((place + BINS_A_SIDE).long(), minlength=NUM_BINS).cpu()


def ratio_quantile(counts: Tensor, at: float) -> float:
    """The ratio that a share `at` of the tokens lies below, from [K] counts; NaN for no tokens.

    Between two tokens, as numpy's linear interpolation, on the geometric middles of their bins.
    """
    total = int(counts.sum())
    if total == 0:
        return nan
    rank = at * (total - 1)
    below, above = (_of_rank(counts, place) for place in (floor(rank), ceil(rank)))
    return below + (rank - floor(rank)) * (above - below)


def _of_rank(counts: Tensor, rank: int) -> float:
    """The ratio in the middle of the bin of the token of a rank (from 0) in ascending order."""
    place = int(torch.searchsorted(counts.cumsum(0), rank, right=True)) - BINS_A_SIDE
    if place == 0:
        return 1.0
    middle = SMALLEST_LOG * GROWTH ** (abs(place) - 0.5)
    return exp(middle if place > 0 else -middle)
