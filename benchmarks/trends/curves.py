"""Curves over training steps, and the look of axes, for the plots of docs/evidence.md."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

SMOOTHED_STEPS = 5


def draw_mean(axes: Axes, series: Sequence[Sequence[float]], name: str) -> None:
    """Mean over seeds and its standard error, smoothed over a few steps."""
    kernel = np.ones(SMOOTHED_STEPS) / SMOOTHED_STEPS
    smooth = np.array([np.convolve(one, kernel, mode="valid") for one in series])
    steps = np.arange(smooth.shape[1]) + SMOOTHED_STEPS
    mean, error = smooth.mean(0), smooth.std(0, ddof=1) / np.sqrt(len(smooth))
    (line,) = axes.plot(steps, mean, label=name, linewidth=1.2)
    axes.fill_between(steps, mean - error, mean + error, color=line.get_color(), alpha=0.15, linewidth=0)


def label(axes: Axes, horizontal: str, vertical: str) -> None:
    """Titles of both axes, without a frame."""
    axes.set_xlabel(horizontal)
    axes.set_ylabel(vertical)
    axes.spines[["top", "right"]].set_visible(False)
