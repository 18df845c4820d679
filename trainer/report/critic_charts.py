"""The critic page of a report: calibration, values along the response, explained variance by length, ages, tokens."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from asyppo_async.trainer.report.figures import bars, heat, laid_out, lines
from asyppo_async.trainer.report.run_data import Row, RunData

KINDS = ("count", "predicted", "observed")
Bin = tuple[float, float, float]
"""Responses, their mean prediction and their success rate."""
TENTHS = [f"{tenth * 10}-{tenth * 10 + 10} %" for tenth in range(10)]


def critic_figures(run: RunData) -> Iterator[tuple[str, str, go.Figure]]:
    """Title, note and figure of each chart; figures without data are left out by the caller."""
    first, last = ends_of(run.steps)
    yield from _calibrations(run, first, last)
    yield (
        "Value along the response",
        "Mean value in each tenth of right and of wrong responses, first and last tenth of the run.",
        _along(first, last),
    )
    for critic in sorted({name.split("/")[0] for name in run.names("critic_", "/explained_variance_used")}):
        names = {
            name.split("explained_variance_")[1].replace("_", " "): name
            for name in run.names(f"{critic}/explained_variance_", "_tokens")
        }
        yield (
            f"Explained variance by length, {critic.replace('_', ' ')}",
            "Of the values that the advantages use, by tokens of the response.",
            _series(run, names),
        )
    yield (
        "Agreement of critics",
        "Correlation of their values over the tokens of the batch.",
        _series(run, {_pair(name): name for name in run.names("critic_") if "/correlation_with_" in name}),
    )
    yield (
        "Success estimate",
        "Brier score (0 is best) and AUC (1 is best) of V(s_0), and of the p that DAPS accepted by, against outcomes.",
        _series(
            run,
            {
                _pair(name): name
                for suffix in ("brier", "auc")
                for name in run.names("critic_", f"/start_{suffix}")
            }
            | {f"DAPS at acceptance, {suffix}": f"selection/success_{suffix}" for suffix in ("brier", "auc")},
        ),
    )
    columns = [
        row["critic_age_histogram_responses"]
        for row in run.steps
        if row.get("critic_age_histogram_responses")
    ]
    yield (
        "Critics ahead of the data",
        "Share of responses by (critics' version - version of the oldest token).",
        heat(run.versions, columns, "versions") if len(columns) == len(run.steps) else go.Figure(),  # type: ignore[arg-type]
    )
    for key, words in (
        ("masked", "whose advantage is masked"),
        ("filtered", "left out of the entropy bonus"),
    ):
        yield (
            f"Tokens {key}",
            f"Most frequent tokens {words}, first and last tenth of the run, share of all that are.",
            _tokens(first, last, f"tokens_{key}"),
        )


def _calibrations(
    run: RunData, first: Sequence[Row], last: Sequence[Row]
) -> Iterator[tuple[str, str, go.Figure]]:
    yield (
        "Calibration of V(s_0)",
        "Observed against predicted success rate, first and last tenth of the run; on the diagonal a critic is right.",
        _calibration(run, {"first tenth": first, "last tenth": last}),
    )
    yield (
        "Calibration of V along the response",
        "Observed against predicted success rate at each decile of the response, last tenth of the run.",
        _calibration_by_decile(last),
    )
    yield (
        "Calibration error along the response",
        "Mean distance of observed from predicted success rate, over tenths of the prediction, at each decile.",
        _calibration_error(first, last),
    )


def ends_of(steps: Sequence[Row]) -> tuple[Sequence[Row], Sequence[Row]]:
    """The first and the last tenth of the rows, at least one each."""
    count = max(1, len(steps) // 10)
    return steps[:count], steps[-count:]


def _series(run: RunData, names: Mapping[str, str]) -> go.Figure:
    return lines(run.versions, {words: run.column(name) for words, name in names.items()})


def _pair(name: str) -> str:
    return name.replace("critic_", "critic ").replace("/correlation_with_", " with ").replace("/start_", " ")


def _calibration(run: RunData, parts: Mapping[str, Sequence[Row]]) -> go.Figure:
    figure = go.Figure()
    for critic in sorted({name.split("/")[0] for name in run.names("critic_", "/calibration_count")}):
        for words, rows in parts.items():
            bins = _bins([[_list(row, f"{critic}/calibration_{kind}") for kind in KINDS] for row in rows])
            _add_curve(figure, bins, f"{critic.replace('_', ' ')}, {words}")
    return _with_diagonal(figure)


def _calibration_by_decile(rows: Sequence[Row]) -> go.Figure:
    figure = go.Figure()
    for decile, bins in enumerate(_decile_bins(rows)):
        shade = sample_colorscale("Viridis", decile / 9)[0]
        _add_curve(figure, bins, f"V at {decile * 10} %", {"color": shade})
    return _with_diagonal(figure)


def _calibration_error(first: Sequence[Row], last: Sequence[Row]) -> go.Figure:
    figure = go.Figure()
    for words, rows in (("first tenth", first), ("last tenth", last)):
        errors = [_error(bins) for bins in _decile_bins(rows)]
        if any(error is not None for error in errors):
            figure.add_scatter(
                x=[f"{decile * 10} %" for decile in range(10)], y=errors, name=words, mode="lines+markers"
            )
    figure.update_yaxes(rangemode="tozero")
    return laid_out(figure, "of the response")


def _add_curve(
    figure: go.Figure, bins: Sequence[Bin], name: str, line: Mapping[str, str] | None = None
) -> None:
    if bins:
        figure.add_scatter(
            x=[predicted for _, predicted, _ in bins],
            y=[observed for _, _, observed in bins],
            name=name,
            mode="lines+markers",
            line=line,
        )


def _with_diagonal(figure: go.Figure) -> go.Figure:
    if figure.data:
        figure.add_scatter(
            x=[0, 1], y=[0, 1], mode="lines", line={"color": "#bbb", "dash": "dot"}, showlegend=False
        )
    return laid_out(figure, "predicted")


def _decile_bins(rows: Sequence[Row]) -> list[list[Bin]]:
    """Of each decile of the response."""
    kept = [[_list(row, f"calibration_by_decile_{kind}") for kind in KINDS] for row in rows]
    full = [kinds for kinds in kept if all(kinds)]
    return [_bins([[of_kind[decile] for of_kind in kinds] for kinds in full]) for decile in range(10)]


def _bins(steps: Sequence[Sequence[Sequence[float]]]) -> list[Bin]:
    """Over all responses of several steps, of each of which there are `KINDS` by tenth of the prediction."""
    found = []
    for tenth in range(10):
        known = [
            (counts[tenth], predicted[tenth], observed[tenth])
            for counts, predicted, observed in steps
            if counts and counts[tenth]
        ]
        total = sum(count for count, _, _ in known)
        if total:
            found.append(
                (
                    total,
                    sum(count * predicted for count, predicted, _ in known) / total,
                    sum(count * observed for count, _, observed in known) / total,
                )
            )
    return found


def _error(bins: Sequence[Bin]) -> float | None:
    """Expected calibration error: mean over responses of |observed - predicted| of their bin."""
    total = sum(count for count, _, _ in bins)
    return (
        sum(count * abs(predicted - observed) for count, predicted, observed in bins) / total
        if total
        else None
    )


def _along(first: Sequence[Row], last: Sequence[Row]) -> go.Figure:
    figure = go.Figure()
    for verdict, colour in (("right", "#2f8f4e"), ("wrong", "#c0392b")):
        for words, rows, dash in (("first tenth", first, "dot"), ("last tenth", last, "solid")):
            found = [_list(row, f"value_of_{verdict}_by_tenth") for row in rows]
            means = [_mean([values[tenth] for values in found if values]) for tenth in range(10)]
            if any(mean is not None for mean in means):
                figure.add_scatter(
                    x=TENTHS, y=means, name=f"{verdict}, {words}", line={"color": colour, "dash": dash}
                )
    return laid_out(figure, "of the response")


def _tokens(first: Sequence[Row], last: Sequence[Row], key: str) -> go.Figure:
    counts = [Counter[str](), Counter[str]()]
    for rows, counter in zip((first, last), counts, strict=True):
        for row in rows:
            for token, count in _list(row, key):
                counter[token or "(end)"] += count
    shown = [token for token, _ in (counts[0] + counts[1]).most_common(10)]
    if not shown:
        return go.Figure()
    return bars(
        shown,
        {
            words: [counter[token] / max(1, counter.total()) for token in shown]
            for words, counter in zip(("first tenth", "last tenth"), counts, strict=True)
        },
    )


def _list(row: Row, key: str) -> list:  # type: ignore[type-arg]
    value = row.get(key)
    return value if isinstance(value, list) else []


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
