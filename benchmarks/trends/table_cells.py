"""What the tables of docs/evidence.md have in common: means with their spread, tests, where the numbers are from."""

import math
import statistics
from collections.abc import Iterable, Sequence

from benchmarks.trends.comparison import Comparison
from benchmarks.trends.results import Measurement, Run


def whole(run: Run) -> float:
    """Mean reward over all steps: how fast it was learned."""
    return statistics.fmean(run.rewards)


def test_of(test: Comparison) -> str:
    """Difference, t and p."""
    if math.isnan(test.t):
        return "the same in every seed"
    return f"{test.difference:+.3f} (t {test.t:.1f}, p {test.p:.3f})"


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean and standard deviation."""
    return f"{statistics.fmean(values):.{digits}f} +- {statistics.stdev(values):.{digits}f}"


def mean(rows: Sequence[dict[str, float | str]], key: str) -> float:
    """Of one column."""
    return statistics.fmean(float(row[key]) for row in rows)


def provenance(runs: Sequence[Run]) -> str:
    """Seeds, steps, tokens, time and commit of the runs of a table."""
    seeds, steps = ({getattr(run, key) for run in runs} for key in ("seed", "num_steps"))
    (num_steps,) = steps  # equal steps, or the comparison means nothing
    tokens = sorted({run.num_tokens for run in runs})
    if any(run.lengths != [] and len(set(run.lengths)) > 1 for run in runs):
        words = f"{tokens[0]:,} to {tokens[-1]:,}"
    else:
        (number,) = tokens  # equal tokens, where the task leaves no choice of length
        words = f"{number:,}"
    return (
        f"{len(seeds)} seeds, {num_steps} steps and {words} tokens a run; "
        f"{statistics.fmean(run.cpu_s for run in runs):.0f} CPU seconds a run; commit {commits(runs)}."
    )


def commits(measured: Iterable[Run | Measurement]) -> str:
    """Of the code that ran."""
    return ", ".join(f"`{commit}`" for commit in sorted({one.commit for one in measured}))
