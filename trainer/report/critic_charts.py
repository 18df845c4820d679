"""The critic page of a report: calibration, values along the response, explained variance by length, ages, tokens."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import plotly.graph_objects as go

from asyppo_async.trainer.report.figures import bars, heat, laid_out, lines
from asyppo_async.trainer.report.run_data import Row, RunData

TENTHS = [f"{tenth * 10}-{tenth * 10 + 10} %" for tenth in range(10)]


def critic_figures(run: RunData) -> Iterator[tuple[str, str, go.Figure]]:
    """Title, note and figure of each chart; figures without data are left out by the caller."""
    first, last = ends_of(run.steps)
    yield (
        "Calibration of V(s_0)",
        "Observed against predicted success rate, first and last tenth of the run; on the diagonal a critic is right.",
        _calibration(run, {"first tenth": first, "last tenth": last}),
    )
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
        "Brier score (0 is best) and AUC (1 is best) of V(s_0) against outcomes.",
        _series(
            run,
            {
                _pair(name): name
                for suffix in ("brier", "auc")
                for name in run.names("critic_", f"/start_{suffix}")
            },
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
            points = [_bin(rows, critic, tenth) for tenth in range(10)]
            known = [point for point in points if point is not None]
            figure.add_scatter(
                x=[point[0] for point in known],
                y=[point[1] for point in known],
                name=f"{critic.replace('_', ' ')}, {words}",
                mode="lines+markers",
            )
    if figure.data:
        figure.add_scatter(
            x=[0, 1], y=[0, 1], mode="lines", line={"color": "#bbb", "dash": "dot"}, showlegend=False
        )
    return laid_out(figure, "predicted")


def _bin(rows: Sequence[Row], critic: str, tenth: int) -> tuple[float, float] | None:
    """Predicted and observed success in one tenth of the prediction, over all responses of the rows."""
    count = predicted = observed = 0.0
    for row in rows:
        counts, means, shares = (
            _list(row, f"{critic}/calibration_{kind}") for kind in ("count", "predicted", "observed")
        )
        if counts and counts[tenth]:
            count += counts[tenth]
            predicted += counts[tenth] * means[tenth]
            observed += counts[tenth] * shares[tenth]
    return (predicted / count, observed / count) if count else None


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
