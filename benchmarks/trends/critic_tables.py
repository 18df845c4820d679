"""The tables of docs/evidence.md that are about critics and the choice of prompts, from what the studies stored."""

import statistics
from collections.abc import Sequence

from benchmarks.trends.arms import Arm
from benchmarks.trends.comparison import compare
from benchmarks.trends.results import Measurement, Results, Run
from benchmarks.trends.study import EARLY_STEPS, late
from benchmarks.trends.table_cells import commits, mean, provenance, spread, test_of, whole

ENDS = ("early/advantage_tenth_0", "early/advantage_tenth_9")


def pretraining(arms: Sequence[Arm], results: Results) -> str:
    """Reward, length and what the first advantages look like along the response."""
    lines = [
        f"| arm | all steps | last fifth | tokens, first {EARLY_STEPS} steps | tokens, last fifth | advantage, first "
        "tenth | advantage, last tenth | difference, all steps | difference, last fifth |",
        "|---" * 9 + "|",
    ]
    runs = [run for arm in arms for run in results.of_arm(arm.name)]
    for arm in arms:
        own, other = results.of_arm(arm.name), results.of_arm(arm.against)
        cells = [arm.name, *(spread([figure(run) for run in own]) for figure in (whole, late))]
        cells += [spread([statistics.fmean(run.lengths[:EARLY_STEPS]) for run in own], 1)]
        cells += [spread([statistics.fmean(run.lengths[-(len(run.lengths) // 5) :]) for run in own], 1)]
        cells += [spread([run.figures[name] for run in own]) for name in ENDS]
        itself = arm.against == arm.name
        tests = [compare([f(run) for run in own], [f(run) for run in other]) for f in (whole, late)]
        cells += ["-"] * 2 if itself else [*map(test_of, tests)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", provenance(runs)])


def coverage(measured: Sequence[Measurement]) -> str:
    """A coverage pool against one of the initial policy."""
    rows = [row for one in measured for row in one.rows if row["kind"] == "pool"]
    lines = [
        "| pool | loss, first 20 steps | loss, last 20 | explained variance, all | of long responses | squared error "
        "on long right ones |",
        "|---" * 6 + "|",
    ]
    for pool in dict.fromkeys(str(row["pool"]) for row in rows):
        here = [row for row in rows if row["pool"] == pool]
        keys = ("loss_first", "loss_last", "explained", "explained_long", "error_long_right")
        lines.append(f"| {pool} | {' | '.join(spread([float(row[key]) for row in here]) for key in keys)} |")
    return "\n".join([*lines, "", _seeds(measured)])


def heads(measured: Sequence[Measurement]) -> str:
    """Std of the value head and bound on the gradient's norm, over the coverage pool."""
    rows = [row for one in measured for row in one.rows if row["kind"] == "head"]
    lines = [
        "| std of the head | clip | clipped steps | loss, first 20 steps | loss, last 20 | explained variance, all | "
        "squared error on long right ones |",
        "|---" * 7 + "|",
    ]
    for std, clip in sorted({(float(row["std"]), float(row["clip"])) for row in rows}):
        here = [row for row in rows if (row["std"], row["clip"]) == (std, clip)]
        keys = ("loss_first", "loss_last", "explained", "error_long_right")
        cells = [f"{std:g}" if std else "1 / (H + 1)", f"{clip:g}", f"{mean(here, 'clipped'):.1%}"]
        cells += [spread([float(row[key]) for row in here]) for key in keys]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", _seeds(measured)])


def reference(measured: Sequence[Measurement]) -> str:
    """How hard the prompts were that each arm trained on, and accuracy on all of them."""
    rows = [row for one in measured for row in one.rows]
    lines = [
        "| step | arm | accuracy on all prompts | difference from uniform | .2 < p_ref <= .8, all prompts | of those "
        "trained on | difference from uniform |",
        "|---" * 7 + "|",
    ]
    for stage in sorted({int(row["stage"]) for row in rows}):
        for arm in dict.fromkeys(str(row["arm"]) for row in rows):
            own, other = (
                [row for row in rows if (row["stage"], row["arm"]) == (stage, name)]
                for name in (arm, "uniform")
            )
            tests = [
                "-" if arm == "uniform" else test_of(compare(_column(own, key), _column(other, key)))
                for key in ("accuracy", "middle_of_trained")
            ]
            shares = [f"{mean(own, key):.1%}" for key in ("middle_of_all", "middle_of_trained")]
            cells = [str(stage), arm, spread(_column(own, "accuracy")), tests[0], *shares, tests[1]]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", _seeds(measured)])


def _column(rows: Sequence[dict[str, float | str]], key: str) -> list[float]:
    return [float(row[key]) for row in rows]


def _seeds(measured: Sequence[Measurement | Run]) -> str:
    return f"{len(measured)} seeds; commit {commits(measured)}."
