"""The plots of docs/evidence.md that are about critics and the choice of prompts, from what the studies stored."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib import pyplot
from matplotlib.figure import Figure

from benchmarks.trends.arms import Arm
from benchmarks.trends.curves import draw_mean, label
from benchmarks.trends.results import Measurement, Results

PANEL = (4.6, 3.2)


def pretraining(arms: Sequence[Arm], results: Results) -> Figure:
    """Reward, length, and the first advantages along the response, arm by arm."""
    figure, (reward, length, advantage) = pyplot.subplots(1, 3, figsize=(3 * PANEL[0], PANEL[1]))
    for arm in arms:
        runs = results.of_arm(arm.name)
        draw_mean(reward, [run.rewards for run in runs], arm.name)
        draw_mean(length, [run.lengths for run in runs], arm.name)
        tenths = np.array(
            [[run.figures[f"early/advantage_tenth_{tenth}"] for tenth in range(10)] for run in runs]
        )
        advantage.plot(range(5, 100, 10), tenths.mean(0), label=arm.name, linewidth=1.2)
    advantage.axhline(0, color="grey", linewidth=0.6)
    reward.legend(fontsize=7, frameon=False, loc="lower right")
    label(reward, "training step", "mean reward")
    label(length, "training step", "tokens of a response")
    label(advantage, "% of the response", "mean advantage, first ten steps")
    return figure


def _coverage(measured: Sequence[Measurement]) -> Figure:
    """Explained variance on the improved policy's responses by pool; every seed is a dot."""
    rows = [row for one in measured for row in one.rows if row["kind"] == "pool"]
    figure, axes = pyplot.subplots(figsize=PANEL)
    pools = list(dict.fromkeys(str(row["pool"]) for row in rows))
    for shift, (key, words) in enumerate((("explained", "all responses"), ("explained_long", "long ones"))):
        for place, pool in enumerate(pools):
            values = [float(row[key]) for row in rows if row["pool"] == pool]
            axes.scatter(
                [place + 0.2 * (shift - 0.5)] * len(values),
                values,
                s=12,
                color=f"C{shift}",
                label=words if place == 0 else None,
            )
    axes.axhline(0, color="grey", linewidth=0.6)
    axes.set_xticks(range(len(pools)), pools)
    axes.set_xlim(-0.5, len(pools) - 0.5)
    axes.legend(fontsize=7, frameon=False)
    label(axes, "pool", "explained variance")
    return figure


def _heads(measured: Sequence[Measurement]) -> Figure:
    """Explained variance by std of the head and clip; every seed is a dot."""
    rows = [row for one in measured for row in one.rows if row["kind"] == "head"]
    stds = sorted({float(row["std"]) for row in rows})
    figure, axes = pyplot.subplots(figsize=PANEL)
    for shift, clip in enumerate(sorted({float(row["clip"]) for row in rows})):
        for place, std in enumerate(stds):
            values = [float(row["explained"]) for row in rows if (row["std"], row["clip"]) == (std, clip)]
            axes.scatter(
                [place + 0.2 * (shift - 0.5)] * len(values),
                values,
                s=12,
                color=f"C{shift}",
                label=f"clip {clip:g}" if place == 0 else None,
            )
    axes.set_xticks(range(len(stds)), [f"{std:g}" if std else "1 / (H + 1)" for std in stds])
    axes.legend(fontsize=7, frameon=False)
    label(axes, "std of the value head", "explained variance")
    return figure


def _reference(measured: Sequence[Measurement]) -> Figure:
    """Accuracy on all prompts, and how often a trained prompt was neither easy nor hard, by arm."""
    rows = [row for one in measured for row in one.rows]
    stages = sorted({int(row["stage"]) for row in rows})
    figure, grid = pyplot.subplots(1, 2, figsize=(2 * PANEL[0], PANEL[1]))
    for axes, key, words in zip(
        grid, ("accuracy", "middle_of_trained"), ("accuracy, all prompts", ".2 < p_ref <= .8, trained prompts"),
        strict=True,
    ):  # fmt: skip
        for arm in dict.fromkeys(str(row["arm"]) for row in rows):
            values = np.array(
                [
                    [float(row[key]) for row in rows if (row["arm"], row["stage"]) == (arm, stage)]
                    for stage in stages
                ]
            )
            error = values.std(1, ddof=1) / np.sqrt(values.shape[1])
            axes.errorbar(stages, values.mean(1), yerr=error, label=arm, linewidth=1.2, capsize=2)
        label(axes, "training step", words)
    grid[0].legend(fontsize=7, frameon=False)
    return figure


MEASURED: Mapping[str, tuple[str, Callable[[Sequence[Measurement]], Figure]]] = {
    "coverage": ("pool and head", _coverage),
    "heads": ("pool and head", _heads),
    "reference": ("reference success", _reference),
}
"""Blocks that are about what was measured beside learning, under which name it is stored, and their plots."""
