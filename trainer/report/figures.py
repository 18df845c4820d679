"""Figures of a report: raw values faint, a moving average in front of them."""

import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

COLOURS = ("#2563a8", "#c8641e", "#2f8f4e", "#a33a6f", "#6b5bb0", "#8a6d1f", "#3b8ea5", "#777777")
HEIGHT = 300
FEW_STEPS = 60


def half_life_steps(num_steps: int) -> int:
    """Of the moving average: a thirtieth of the run."""
    return max(1, round(num_steps / 30))


def smoothed(values: Sequence[float], half_life: int) -> list[float]:
    """Exponential moving average whose first values are not drawn to zero; NaN is passed over, and stays NaN."""
    keep = 0.5 ** (1 / half_life)
    total = weight = 0.0
    result = []
    for value in values:
        if math.isnan(value):
            result.append(math.nan)
            continue
        total, weight = keep * total + value, keep * weight + 1
        result.append(total / weight)
    return result


def lines(
    versions: Sequence[float], series: Mapping[str, Sequence[float]], *, log: bool = False, zero: bool = False
) -> go.Figure:
    """One line for each of `series` that has a number."""
    figure = go.Figure()
    half_life = half_life_steps(len(versions))
    for index, (name, values) in enumerate(series.items()):
        if all(math.isnan(value) for value in values):
            continue
        colour = COLOURS[index % len(COLOURS)]
        raw = {"x": versions, "y": values, "mode": "lines", "hoverinfo": "skip", "showlegend": False}
        figure.add_scatter(**raw, line={"color": colour, "width": 1}, opacity=0.3)
        # A value between gaps is no line: few steps get markers too.
        mode = "lines+markers" if len(values) <= FEW_STEPS else "lines"
        figure.add_scatter(
            x=versions,
            y=smoothed(values, half_life),
            name=name,
            mode=mode,
            line={"color": colour},
            marker={"size": 4},
        )
    figure.update_yaxes(type="log" if log else "linear", rangemode="tozero" if zero else "normal")
    return laid_out(figure)


def stacked(versions: Sequence[float], series: Mapping[str, Sequence[float]]) -> go.Figure:
    """Bars on top of each other, one for each step; no smoothing."""
    figure = go.Figure()
    for index, (name, values) in enumerate(series.items()):
        figure.add_bar(x=versions, y=values, name=name, marker_color=COLOURS[index % len(COLOURS)])
    figure.update_layout(barmode="stack", bargap=0)
    figure.update_traces(marker_line_width=0)
    return laid_out(figure)


def heat(versions: Sequence[float], columns: Sequence[Sequence[float]], y_title: str) -> go.Figure:
    """Shares by a whole number (row) and step (column); columns may differ in length."""
    height = max((len(column) for column in columns), default=0)
    rows = [[_share(column, row) for column in columns] for row in range(height)]
    figure = go.Figure(
        go.Heatmap(
            x=versions,
            y=list(range(height)),
            z=rows,
            zmin=0,
            zmax=1,
            colorscale="Blues",
            colorbar={"title": "share"},
        )
    )
    figure.update_yaxes(title=y_title, dtick=1)
    return laid_out(figure)


def points(
    versions: Sequence[float], series: Mapping[str, tuple[Sequence[float], Sequence[float]]]
) -> go.Figure:
    """Values with their standard errors as bars."""
    figure = go.Figure()
    for index, (name, (values, errors)) in enumerate(series.items()):
        figure.add_scatter(
            x=versions,
            y=values,
            name=name,
            mode="lines+markers",
            error_y={"array": [0 if math.isnan(error) else error for error in errors]},
            line={"color": COLOURS[index % len(COLOURS)]},
        )
    figure.update_yaxes(tickformat=".0%")
    return laid_out(figure)


def bars(names: Sequence[str], series: Mapping[str, Sequence[float]]) -> go.Figure:
    """Bars side by side, one group for each name."""
    figure = go.Figure()
    for index, (words, values) in enumerate(series.items()):
        figure.add_bar(x=[repr(name) for name in names], y=values, name=words, marker_color=COLOURS[index])
    figure.update_yaxes(tickformat=".0%")
    return laid_out(figure, "")


def laid_out(figure: go.Figure, x_title: str = "version") -> go.Figure:
    """The look that all figures share."""
    figure.update_layout(
        template="plotly_white",
        height=HEIGHT,
        margin={"l": 55, "r": 15, "t": 10, "b": 40},
        legend={
            "orientation": "h",
            "y": 1.02,
            "yanchor": "bottom",
            "traceorder": "normal",
            "font": {"size": 11},
        },
    )
    figure.update_xaxes(title=x_title)
    return figure


def _share(column: Sequence[float], row: int) -> float:
    whole = math.fsum(column)
    return column[row] / whole if row < len(column) and whole else 0.0
