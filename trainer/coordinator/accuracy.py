"""How often a policy is right on held-out prompts: avg@k, pass@k, each with the standard error over prompts."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    value: float
    standard_error: float
    """Over prompts, because the samples of one prompt are not independent; NaN for fewer than two."""


def average(right: Sequence[Sequence[bool]]) -> Estimate:
    """avg@k: mean over prompts of the share of right samples.

    Args:
        right: For each prompt, which of its samples are right; no prompt is without samples.
    """
    return _over_prompts([sum(row) / len(row) for row in right])


def passes(right: Sequence[Sequence[bool]]) -> dict[int, Estimate]:
    """pass@k for k = 1, 2, 4, ... up to the fewest samples of a prompt: the chance that one of k is right.

    The unbiased estimate from n samples of which c are right, 1 - C(n - c, k) / C(n, k) (Codex 2107.03374, eq. 1).
    """
    return {
        k: _over_prompts([1 - math.comb(len(row) - sum(row), k) / math.comb(len(row), k) for row in right])
        for k in _powers_of_two(min(map(len, right)))
    }


def _powers_of_two(limit: int) -> Iterator[int]:
    k = 1
    while k <= limit:
        yield k
        k *= 2


def _over_prompts(values: Sequence[float]) -> Estimate:
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return Estimate(value=mean, standard_error=math.nan)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return Estimate(value=mean, standard_error=math.sqrt(variance / len(values)))
