"""The tables of docs/evidence.md, from what the studies stored."""

import math
import statistics
from collections.abc import Iterable, Sequence

from benchmarks.trends.arms import Arm
from benchmarks.trends.comparison import Comparison, compare
from benchmarks.trends.results import Measurement, Results, Run
from benchmarks.trends.studies import STUDIES
from benchmarks.trends.study import late

BLOCKS = ("ladder", "staleness", "mismatch", "gradients", "lambda", "std", "daps", "best_of")
"""Of the page, each made from one study's results."""
STUDY_OF = {
    "ladder": "ladder",
    "staleness": "staleness",
    "mismatch": "staleness",
    "gradients": "staleness",
    "lambda": "lambda",
    "std": "lambda",
    "daps": "daps",
    "best_of": "best_of",
}
METHODS = ("no correction", "IcePoP mask", "IcePoP mask + MIS", "IcePoP weight", "TIS 2")


def block(name: str, results: Results) -> str:
    """One table and the line below it."""
    if name == "gradients":
        return _gradients(results.measured("gradient error"))
    if name == "best_of":
        return _best_of(results.measured("best of n"))
    if name == "std":
        return _std(results.measured("value std and gradient"))
    return _arms(arms_of(name), results)


def arms_of(name: str) -> list[Arm]:
    """The arms that a block compares; the staleness study holds two comparisons."""
    arms = STUDIES[STUDY_OF[name]].arms
    if name == "staleness":
        return [arm for arm in arms if "lag" in arm.name]
    if name == "mismatch":
        return [arm for arm in arms if "lag" not in arm.name]
    return list(arms)


def whole(run: Run) -> float:
    """Mean reward over all steps: how fast it was learned."""
    return statistics.fmean(run.rewards)


def _arms(arms: Sequence[Arm], results: Results) -> str:
    lines = [
        "| arm | all steps | last fifth | clipped | compared with | difference, all steps | difference, last fifth |",
        "|---|---|---|---|---|---|---|",
    ]
    runs = [run for arm in arms for run in results.of_arm(arm.name)]
    for arm in arms:
        own, other = results.of_arm(arm.name), results.of_arm(arm.against)
        cells = [arm.name]
        tests = []
        for figure in (whole, late):
            values = [figure(run) for run in own]
            cells.append(_spread(values))
            tests.append(compare(values, [figure(run) for run in other]))
        cells.append(f"{statistics.fmean(map(_clipped, own)):.1%}")
        itself = arm.against == arm.name
        cells += ["-"] * 3 if itself else [arm.against, *map(_test, tests)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", _provenance(runs)])


def _clipped(run: Run) -> float:
    """Share of tokens whose gradient the clip takes, mean over all optimizer steps."""
    return sum(run.figures[f"actor/clip_fraction_{side}"] for side in ("low", "high"))


def _test(test: Comparison) -> str:
    if math.isnan(test.t):
        return "the same in every seed"
    return f"{test.difference:+.3f} (t {test.t:.1f}, p {test.p:.3f})"


def _spread(values: Sequence[float], digits: int = 3) -> str:
    return f"{statistics.fmean(values):.{digits}f} +- {statistics.stdev(values):.{digits}f}"


def _provenance(runs: Sequence[Run]) -> str:
    seeds, steps, tokens = (
        {getattr(run, key) for run in runs} for key in ("seed", "num_steps", "num_tokens")
    )
    return (
        f"{len(seeds)} seeds, {_one(steps)} steps and {_one(tokens):,} tokens a run; "
        f"{statistics.fmean(run.cpu_s for run in runs):.0f} CPU seconds a run; commit {_commits(runs)}."
    )


def _one(values: set[int]) -> int:
    (value,) = values  # equal steps and tokens, or the comparison means nothing
    return value


def _commits(measured: Iterable[Run | Measurement]) -> str:
    return ", ".join(f"`{commit}`" for commit in sorted({one.commit for one in measured}))


def _gradients(measured: Sequence[Measurement]) -> str:
    rows = [row for one in measured for row in one.rows]
    lines = [
        "| step | engine | mean, largest abs(log ratio) | outside [0.5, 5] "
        f"| {' | '.join(METHODS)} | one batch's noise |",
        "|---" * (len(METHODS) + 5) + "|",
    ]
    for stage in sorted({int(row["stage"]) for row in rows}):
        for engine in sorted({str(row["engine"]) for row in rows}):
            here = [row for row in rows if row["stage"] == stage and row["engine"] == engine]
            plain = [row for row in here if row["method"] == "no correction"]
            masked = [row for row in here if row["method"] == "IcePoP mask"]
            errors = [
                _spread([float(row["error"]) for row in here if row["method"] == method], 4)
                for method in METHODS
            ]
            cells = [
                str(stage),
                engine,
                f"{_mean(plain, 'mean_log_ratio'):.4f}, {max(float(row['largest_log_ratio']) for row in plain):.3f}",
                f"{sum(int(row['rejected_tokens']) for row in masked)} tokens",
                *errors,
                f"{_mean(plain, 'batch_noise'):.2f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{len(measured)} seeds; commit {_commits(measured)}."])


def _std(measured: Sequence[Measurement]) -> str:
    lines = [
        "| step | reward | std, gradient | std, abs(A) | std, norm | both low | std low, gradient high | std high, "
        "gradient low | both high | masked fifth: gradient / mean |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for stage in sorted({int(row["stage"]) for one in measured for row in one.rows}):
        rows = [row for one in measured for row in one.rows if row["stage"] == stage]
        cells = [str(stage), f"{_mean(rows, 'reward'):.2f}"]
        for key in ("rank_std_gradient", "rank_std_advantage", "rank_std_norm"):
            values = [float(row[key]) for row in rows]
            cells.append(f"{_spread(values, 2)} (p {compare(values, [0.0] * len(values)).p:.3f})")
        cells += [f"{_mean(rows, key):.1%}" for key in ("low_low", "low_high", "high_low", "high_high")]
        cells.append(_spread([float(row["masked_gradient"]) for row in rows], 2))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{len(measured)} seeds; commit {_commits(measured)}."])


def _best_of(measured: Sequence[Measurement]) -> str:
    rows = [row for one in measured for row in one.rows]
    numbers = sorted({int(row["n"]) for row in rows})
    lines = [
        f"| step | chosen by | {' | '.join(f'n = {number}' for number in numbers)} |",
        "|---" * (len(numbers) + 2) + "|",
    ]
    for stage in sorted({int(row["stage"]) for row in rows}):
        for way in dict.fromkeys(str(row["way"]) for row in rows):
            cells = []
            for number in numbers:
                here = [row for row in rows if (row["stage"], row["way"], row["n"]) == (stage, way, number)]
                cells.append(_spread([float(row["accuracy"]) for row in here]))
            lines.append(f"| {stage} | {way} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{len(measured)} seeds; commit {_commits(measured)}."])


def _mean(rows: Sequence[dict[str, float | str]], key: str) -> float:
    return statistics.fmean(float(row[key]) for row in rows)
