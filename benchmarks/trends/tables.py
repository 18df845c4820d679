"""The tables of docs/evidence.md, from what the studies stored."""

import statistics
from collections.abc import Callable, Mapping, Sequence

from benchmarks.trends import critic_tables
from benchmarks.trends.arms import Arm
from benchmarks.trends.comparison import compare
from benchmarks.trends.results import Measurement, Results, Run
from benchmarks.trends.studies import STUDIES
from benchmarks.trends.study import late
from benchmarks.trends.table_cells import commits, mean, provenance, spread, test_of, whole

STUDY_OF = {
    "ladder": "ladder",
    "staleness": "staleness",
    "mismatch": "staleness",
    "gradients": "staleness",
    "lambda": "lambda",
    "std": "lambda",
    "daps": "daps",
    "reference": "daps",
    "best_of": "best_of",
    "pretraining": "pretraining",
    "coverage": "coverage",
    "heads": "coverage",
    "single": "single",
    "orthogonal": "orthogonal",
}
"""Blocks of the page, each made from one study's results."""
BLOCKS = tuple(STUDY_OF)
METHODS = ("no correction", "IcePoP mask", "IcePoP mask + MIS", "IcePoP weight", "TIS 2")


def block(name: str, results: Results) -> str:
    """One table and the line below it."""
    if name in MEASURED:
        stored, table = MEASURED[name]
        return table(results.measured(stored))
    if name == "pretraining":
        return critic_tables.pretraining(arms_of(name), results)
    return _arms(arms_of(name), results)


def arms_of(name: str) -> list[Arm]:
    """The arms that a block compares; the staleness study holds two comparisons."""
    arms = STUDIES[STUDY_OF[name]].arms
    if name == "staleness":
        return [arm for arm in arms if "lag" in arm.name]
    if name == "mismatch":
        return [arm for arm in arms if "lag" not in arm.name]
    return list(arms)


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
            cells.append(spread(values))
            tests.append(compare(values, [figure(run) for run in other]))
        cells.append(f"{statistics.fmean(map(_clipped, own)):.1%}")
        itself = arm.against == arm.name
        cells += ["-"] * 3 if itself else [arm.against, *map(test_of, tests)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", provenance(runs)])


def _clipped(run: Run) -> float:
    """Share of tokens whose gradient the clip takes, mean over all optimizer steps."""
    return sum(run.figures[f"actor/clip_fraction_{side}"] for side in ("low", "high"))


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
                spread([float(row["error"]) for row in here if row["method"] == method], 4)
                for method in METHODS
            ]
            cells = [
                str(stage),
                engine,
                f"{mean(plain, 'mean_log_ratio'):.4f}, {max(float(row['largest_log_ratio']) for row in plain):.3f}",
                f"{sum(int(row['rejected_tokens']) for row in masked)} tokens",
                *errors,
                f"{mean(plain, 'batch_noise'):.2f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{len(measured)} seeds; commit {commits(measured)}."])


def _std(measured: Sequence[Measurement]) -> str:
    lines = [
        "| step | reward | std, gradient | std, abs(A) | std, norm | both low | std low, gradient high | std high, "
        "gradient low | both high | masked fifth: gradient / mean |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for stage in sorted({int(row["stage"]) for one in measured for row in one.rows}):
        rows = [row for one in measured for row in one.rows if row["stage"] == stage]
        cells = [str(stage), f"{mean(rows, 'reward'):.2f}"]
        for key in ("rank_std_gradient", "rank_std_advantage", "rank_std_norm"):
            values = [float(row[key]) for row in rows]
            cells.append(f"{spread(values, 2)} (p {compare(values, [0.0] * len(values)).p:.3f})")
        cells += [f"{mean(rows, key):.1%}" for key in ("low_low", "low_high", "high_low", "high_high")]
        cells.append(spread([float(row["masked_gradient"]) for row in rows], 2))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{len(measured)} seeds; commit {commits(measured)}."])


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
                cells.append(spread([float(row["accuracy"]) for row in here]))
            lines.append(f"| {stage} | {way} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{len(measured)} seeds; commit {commits(measured)}."])


MEASURED: Mapping[str, tuple[str, Callable[[Sequence[Measurement]], str]]] = {
    "gradients": ("gradient error", _gradients),
    "std": ("value std and gradient", _std),
    "best_of": ("best of n", _best_of),
    "reference": ("reference success", critic_tables.reference),
    "coverage": ("pool and head", critic_tables.coverage),
    "heads": ("pool and head", critic_tables.heads),
}
"""Blocks that are about what was measured beside learning, under which name it is stored, and their tables."""
