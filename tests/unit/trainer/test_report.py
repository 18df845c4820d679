"""The report: one file with everything in it, from any run folder, whatever the responses say."""

import json
import math
from html.parser import HTMLParser
from pathlib import Path

import pytest

from asyppo_async.errors import ConfigError
from asyppo_async.trainer.report.critic_charts import critic_figures
from asyppo_async.trainer.report.figures import smoothed
from asyppo_async.trainer.report.page import write_report
from asyppo_async.trainer.report.run_data import read_run
from tests.unit.trainer.browser import needs_chromium, open_in_chromium

HOSTILE = "<script>alert(1)</script> & 3 < 4 </td> \\boxed{7}"


def a_row(version: int) -> dict[str, object]:
    age = [10.0 - version, float(version)]
    return {
        "version": version,
        "reward/mean": 0.1 * version,
        "reward/accuracy": 0.5 + 0.05 * version,
        "actor/entropy": None if version == 2 else 0.4,
        "actor/grad_norm": 1.0 / version,
        "critic_0/explained_variance_used": 0.1,
        "critic_1/explained_variance_used": -0.2,
        **{f"critic_0/{part}_{kind}": 1.5 for part in ("head", "backbone") for kind in ("norm", "grad_norm")},
        "calibration_by_decile_count": [[8.0, 2.0, *[0.0] * 8]] * 9 + [[0.0] * 10],
        "calibration_by_decile_predicted": [[0.05, 0.15, *[None] * 8]] * 10,
        "calibration_by_decile_observed": [[0.05, 0.65, *[None] * 8]] * 10,
        "value_std/p50": 0.3,
        "tokens/trained": 90.0,
        "tokens/rejected": 10.0,
        "mismatch/ratio_mean": 1.0,
        "mismatch/gap_mean_staleness_0": 1e-7,
        "probe/fresh_gap_mean_nats": 2e-7,
        "time/step_s": 2.0,
        "time/wait_s": 0.5,
        "weights/load_s": 0.1,
        "waste/tokens_generated": 120.0 * version,
        "waste/tokens_trained": 90.0 * version,
        "waste/tokens_rejected": 10.0 * version,
        "staleness_histogram_tokens": age,
        "staleness_histogram_responses": age[:1] if version == 1 else age,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text('[run]\nname = "x"\n')
    rows = [a_row(version) for version in range(1, 6)]
    abandoned = {**a_row(6), "abandoned": True, "reward/mean": 99.0}
    lines = [json.dumps(row) for row in (*rows[:3], abandoned, *rows[3:])]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"version": 6, "rew')
    sample = {"step": 4, "prompt": HOSTILE, "response": HOSTILE, "reward": -1.0, "tokens": 7}
    (tmp_path / "samples.jsonl").write_text(json.dumps({**sample, "finish_reason": "length"}) + "\n")
    evaluation = {"version": 5, "accuracy": 0.6, "accuracy_standard_error": 0.01, "greedy_accuracy": None}
    (tmp_path / "evaluations.jsonl").write_text(json.dumps(evaluation) + "\n")
    summary = {"outcome": "failed", "error": "server <b>gone</b>", "steps": 5, "accuracy_end": None}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    return tmp_path


class Page(HTMLParser):
    """What a browser would build of the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.classes: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self._stack: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.classes.append(values.get("class") or "")
        self.links += [values[name] or "" for name in ("src", "href") if values.get(name)]
        self._stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._stack:
            while self._stack.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if "script" not in self._stack:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def test_report_holds_every_section_and_needs_no_network(folder: Path) -> None:
    page = Page(write_report(folder).read_text())
    assert page.links == ["data:,"], "nothing is fetched"
    for title in (
        "Learning", "Staleness", "Ratios and masks", "Critics", "Engine against trainer", "Time", "Waste ledger",
        "Sample responses", "Settings",
    ):  # fmt: skip
        assert title in page.text
    assert page.classes.count("plotly-graph-div") == page.classes.count("card") >= 15
    for title in ("Critics: norm of head and backbone", "Critics: grad norm of head and backbone"):
        assert title in page.text
    assert "half-life of 1 step." in page.text and "5 steps shown" in page.text
    assert "server <b>gone</b>" in page.text, "the error is shown as it was said"
    for words in ("generated 600 100.00%", "trained 450 75.00%", "rejected 50 8.33%", "in flight 100 16.67%"):
        assert words in " ".join(page.text.split())


def test_critic_page_when_a_decile_has_no_response_leaves_it_out_and_weighs_errors_by_responses(
    folder: Path,
) -> None:
    figures = {title: figure for title, _, figure in critic_figures(read_run(folder))}
    curves = figures["Calibration of V along the response"].data
    assert [curve.name for curve in curves[:-1]] == [f"V at {decile * 10} %" for decile in range(9)]
    assert list(curves[0].x) == pytest.approx([0.05, 0.15]) and list(curves[0].y) == pytest.approx(
        [0.05, 0.65]
    )
    errors = figures["Calibration error along the response"].data[0].y
    assert errors[0] == pytest.approx(0.2 * 0.5) and errors[9] is None


def test_report_when_a_response_holds_markup_shows_it_as_text(folder: Path) -> None:
    text = write_report(folder).read_text()
    assert "<script>alert(1)" not in text
    assert Page(text).text.count(HOSTILE) == 2


def test_run_data_leaves_out_abandoned_rows_and_half_a_line(folder: Path) -> None:
    run = read_run(folder)
    assert run.versions == [1, 2, 3, 4, 5]
    assert math.isnan(run.column("actor/entropy")[1]) and run.names(
        "critic_", "/explained_variance_used"
    ) == [
        "critic_0/explained_variance_used",
        "critic_1/explained_variance_used",
    ]


def test_report_when_the_folder_is_none_or_broken_says_where(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run folder"):
        write_report(tmp_path / "other")
    (folder / "metrics.jsonl").write_text('{"version": 1}\n{"version": \n{"version": 3}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 2"):
        write_report(folder)


def test_report_when_the_run_has_no_step_yet_is_written_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    assert "still running" in write_report(tmp_path).read_text()


def test_smoothing_when_all_values_are_equal_changes_nothing_and_keeps_gaps() -> None:
    flat = smoothed([2.0, 2.0, math.nan, 2.0], half_life=3)
    assert flat[:2] == [2.0, 2.0] and math.isnan(flat[2]) and flat[3] == 2.0
    step = smoothed([0.0, 1.0], half_life=1)
    assert step == [0.0, pytest.approx(1 / 1.5)], "weights 1/2 and 1"


@needs_chromium
def test_report_when_a_browser_opens_it_draws_every_chart(folder: Path) -> None:
    built = Page(open_in_chromium(write_report(folder), "--dump-dom"))
    assert built.classes.count("main-svg") >= built.classes.count("card") >= 15, "plotly drew into every card"
