"""The plots of docs/evidence.md, from what the studies stored."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot
from matplotlib.figure import Figure

from benchmarks.trends import critic_figures
from benchmarks.trends.arms import Arm
from benchmarks.trends.curves import draw_mean, label
from benchmarks.trends.results import Measurement, Results
from benchmarks.trends.tables import METHODS, arms_of

# The same results give the same bytes: no date, no random ids, text as text.
mpl.use("Agg")
mpl.rcParams.update({"svg.hashsalt": "asyppo", "svg.fonttype": "none", "font.size": 9, "path.simplify": True})


def draw(name: str, results: Results, path: Path) -> None:
    """The plot of one block."""
    if name == "gradients":
        figure = _gradients(results.measured("gradient error"))
    elif name == "best_of":
        figure = _best_of(results.measured("best of n"))
    elif name == "std":
        figure = _std(results.measured("value std and gradient"))
    elif name in critic_figures.MEASURED:
        stored, drawn = critic_figures.MEASURED[name]
        figure = drawn(results.measured(stored))
    elif name == "pretraining":
        figure = critic_figures.pretraining(arms_of(name), results)
    else:
        figure = _curves(_panels(name), results)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)


def _panels(name: str) -> list[list[Arm]]:
    """Arms that share axes."""
    arms = arms_of(name)
    if name == "staleness":
        return [[arm for arm in arms if arm.lag == lag] for lag in sorted({arm.lag for arm in arms})]
    if name == "ladder":
        return [arms[:5], [arms[2], *arms[5:]]]
    if name == "mismatch":
        return [[arms[0], *(arm for arm in arms if arm.engine is engine)] for engine in _engines(arms)]
    return [arms]


def _engines(arms: Sequence[Arm]) -> list[object]:
    return list(dict.fromkeys(arm.engine for arm in arms[1:]))


def _curves(panels: Sequence[Sequence[Arm]], results: Results) -> Figure:
    """Mean reward and its standard error over seeds, smoothed over a few steps."""
    figure, grid = pyplot.subplots(
        1, len(panels), figsize=(4.6 * len(panels), 3.2), sharey=True, squeeze=False
    )
    for axes, arms in zip(grid[0], panels, strict=True):
        for arm in arms:
            draw_mean(axes, [run.rewards for run in results.of_arm(arm.name)], arm.name)
        axes.legend(fontsize=7, frameon=False, loc="lower right")
        label(axes, "training step", "mean reward" if axes is grid[0][0] else "")
    return figure


def _gradients(measured: Sequence[Measurement]) -> Figure:
    """Relative error of the gradient by method; every seed is a dot."""
    rows = [row for one in measured for row in one.rows]
    engines = sorted({str(row["engine"]) for row in rows})
    figure, grid = pyplot.subplots(
        1, len(engines), figsize=(4.6 * len(engines), 3.2), sharey=True, squeeze=False
    )
    for axes, engine in zip(grid[0], engines, strict=True):
        for place, method in enumerate(METHODS):
            for shift, stage in enumerate(sorted({int(row["stage"]) for row in rows})):
                errors = [
                    float(row["error"])
                    for row in rows
                    if (row["engine"], row["method"], row["stage"]) == (engine, method, stage)
                ]
                axes.scatter(
                    [place + 0.2 * (shift - 1)] * len(errors),
                    errors,
                    s=9,
                    color=f"C{shift}",
                    label=f"after {stage} steps" if place == 0 else None,
                )
        axes.set_yscale("log")
        axes.set_xticks(range(len(METHODS)), METHODS, rotation=25, ha="right")
        axes.legend(fontsize=7, frameon=False)
        axes.set_title(engine, fontsize=9)
        label(axes, "", "relative error of the gradient" if axes is grid[0][0] else "")
    return figure


def _std(measured: Sequence[Measurement]) -> Figure:
    """Rank correlations by training step; every seed is a dot, the line is the mean."""
    rows = [row for one in measured for row in one.rows]
    stages = sorted({int(row["stage"]) for row in rows})
    figure, axes = pyplot.subplots(figsize=(4.6, 3.2))
    for index, (key, words) in enumerate(
        (("rank_std_gradient", "gradient"), ("rank_std_advantage", "abs(A)"), ("rank_std_norm", "norm"))
    ):
        by_stage = [[float(row[key]) for row in rows if row["stage"] == stage] for stage in stages]
        axes.plot(
            stages, [np.mean(values) for values in by_stage], color=f"C{index}", label=f"std against {words}"
        )
        for stage, values in zip(stages, by_stage, strict=True):
            axes.scatter([stage + index - 1] * len(values), values, s=9, color=f"C{index}")
    axes.axhline(0, color="grey", linewidth=0.6)
    axes.legend(fontsize=7, frameon=False)
    label(axes, "training step", "rank correlation over tokens")
    return figure


def _best_of(measured: Sequence[Measurement]) -> Figure:
    """Accuracy by the number of responses to choose from, mean over seeds."""
    rows = [row for one in measured for row in one.rows]
    stages = sorted({int(row["stage"]) for row in rows})
    numbers = sorted({int(row["n"]) for row in rows})
    figure, grid = pyplot.subplots(
        1, len(stages), figsize=(4.6 * len(stages), 3.2), sharey=True, squeeze=False
    )
    for axes, stage in zip(grid[0], stages, strict=True):
        for way in dict.fromkeys(str(row["way"]) for row in rows):
            chosen = [row for row in rows if (row["stage"], row["way"]) == (stage, way)]
            means = [
                np.mean([float(row["accuracy"]) for row in chosen if row["n"] == number])
                for number in numbers
            ]
            axes.plot(numbers, means, label=way, linewidth=1.2)
        axes.set_xscale("log", base=2)
        axes.set_title(f"after {stage} steps", fontsize=9)
        label(axes, "responses", "accuracy" if axes is grid[0][0] else "")
    grid[0][-1].legend(fontsize=7, frameon=False)
    return figure
