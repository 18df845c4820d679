"""The page itself: tiles, charts, the waste ledger and sample responses in one file."""

import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import plotly.io
from jinja2 import Environment, StrictUndefined

from asyppo_async.trainer.report.charts import sections
from asyppo_async.trainer.report.figures import half_life_steps
from asyppo_async.trainer.report.run_data import RunData, read_run

NUM_SAMPLES = 40


def write_report(folder: Path) -> Path:
    """Write `report.html` into a run folder, in place of an older one.

    Raises:
        ConfigError: `folder` is no run folder.
    """
    page = folder / "report.html"
    temporary = folder / ".report.html.partial"
    temporary.write_text(render(read_run(folder)), encoding="utf-8")
    os.replace(temporary, page)
    return page


def render(run: RunData) -> str:
    """The page as HTML. Text of the run is escaped; plotly.js is inside, so nothing is fetched."""
    template = files("asyppo_async.trainer.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    shown = [
        {
            "title": section.title,
            "charts": [
                {
                    "title": chart.title,
                    "note": chart.note,
                    "html": plotly.io.to_html(
                        chart.figure,
                        full_html=False,
                        include_plotlyjs=False,
                        config={"displaylogo": False, "responsive": True, "displayModeBar": "hover"},
                    ),
                }
                for chart in section.charts
            ],
        }
        for section in sections(run)
    ]
    return environment.from_string(template).render(
        name=run.folder.name,
        plotly_js=plotly.offline.get_plotlyjs(),
        summary=run.summary,
        tiles=list(_tiles(run)),
        half_life=half_life_steps(len(run.steps)),
        num_steps=len(run.steps),
        sections=shown,
        waste=list(_waste(run)),
        samples=list(reversed(run.samples[-NUM_SAMPLES:])),
        config=run.config,
    )


def _tiles(run: RunData) -> Iterator[tuple[str, str]]:
    """Figures of the summary that are there, each with its words."""
    summary = run.summary
    formats = (
        ("accuracy_start", "accuracy before", "{:.1%}"),
        ("accuracy_end", "accuracy after", "{:.1%}"),
        ("steps", "steps", "{}"),
        ("step_seconds_mean", "a step", "{:.2f} s"),
        ("wait_seconds_mean", "of it waiting", "{:.2f} s"),
        ("max_staleness_bound", "staleness bound", "{}"),
        ("max_staleness_seen", "oldest trained", "{}"),
        ("groups_trained", "groups trained", "{}"),
        ("groups_dropped", "groups dropped", "{}"),
        ("logprob_gap_fresh_mean", "fresh gap (nats)", "{:.1e}"),
        ("publication_seconds_mean", "a publication", "{:.2f} s"),
        ("wall_seconds", "wall clock", "{:.0f} s"),
    )
    for key, words, form in formats:
        if summary.get(key) is not None:
            yield words, form.format(summary[key])


def _waste(run: RunData) -> Iterator[tuple[str, float, float]]:
    """Rows of the waste ledger: words, tokens, share of what was generated. Of the last step's row."""
    if not run.steps:
        return
    last = run.steps[-1]
    prefix = "waste/tokens_"
    tokens = {
        name.removeprefix(prefix): float(value)
        for name, value in last.items()
        if name.startswith(prefix) and isinstance(value, int | float)
    }
    generated = tokens.pop("generated", 0.0)
    yield "generated", generated, 1.0
    for name, number in tokens.items():
        if number or name == "trained":
            yield name.replace("_", " "), number, number / generated if generated else 0.0
    rest = generated - sum(tokens.values())
    if rest:
        yield "queued or in flight", rest, rest / generated
