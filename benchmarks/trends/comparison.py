"""Comparisons over seeds: mean difference, paired t, and the exact sign-flip test, which assumes no distribution."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Of one arm with another, seed by seed."""

    difference: float
    """Mean over seeds."""
    t: float
    """NaN where it is not defined: fewer than two seeds, or the same difference in all of them."""
    p: float
    """Two-sided: the share of all ways to flip signs of the differences that give a mean at least as far from 0."""


def compare(one: Sequence[float], other: Sequence[float]) -> Comparison:
    """`one` minus `other`; the same seeds in the same order."""
    differences = [left - right for left, right in zip(one, other, strict=True)]
    mean = statistics.fmean(differences)
    spread = statistics.stdev(differences) if len(differences) > 1 else 0.0
    t = mean / (spread / math.sqrt(len(differences))) if spread > 0 else math.nan
    flips = list(itertools.product((1, -1), repeat=len(differences)))
    least = abs(sum(differences)) * (1 - 1e-12)
    as_far = sum(
        abs(sum(sign * value for sign, value in zip(signs, differences, strict=True))) >= least
        for signs in flips
    )
    return Comparison(difference=mean, t=t, p=as_far / len(flips))
