"""Names and shapes of what is measured. A metric is a number under `area/name_unit`; one sink writes them."""

import math
from collections.abc import Iterable, Mapping
from typing import TypeAlias

Metrics: TypeAlias = dict[str, float]


def merge(parts: Iterable[Mapping[str, float]]) -> Metrics:
    """One mapping of all parts; a name that two parts claim is a bug."""
    merged: Metrics = {}
    for part in parts:
        clash = merged.keys() & part.keys()
        assert not clash, f"metric measured twice: {sorted(clash)}"
        merged.update(part)
    return merged


def mean_of(values: Iterable[float]) -> float:
    """Mean; NaN of nothing."""
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else float("nan")


def known(metrics: Mapping[str, float]) -> Metrics:
    """Without the statistics of nothing (of stale tokens where none is stale), which are NaN."""
    return {name: value for name, value in metrics.items() if not math.isnan(value)}
