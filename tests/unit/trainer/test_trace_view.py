"""Responses token by token: what is kept of a step, the page, and where a critic sees that an answer turned."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from asyppo_async.errors import ConfigError
from asyppo_async.tasks.arithmetic import first_slip
from asyppo_async.trainer.coordinator.measures.critic_record import critic_record
from asyppo_async.trainer.trace_view import count_slips, read_traces, write_trace_page
from asyppo_async.trainer.traces import trace_rows
from tests.unit.composition.tiny import open_run, shrunk
from tests.unit.trainer.browser import needs_chromium, open_in_chromium


def decode(ids: list[int]) -> str:
    return "".join(chr(97 + token) for token in ids)


@pytest.mark.parametrize(
    ("text", "slip"),
    [
        ("3,11,16#16", None),
        ("3,12,17#17", 3),
        ("3,11,16#17", 9),
        ("#16", None),
        ("#26", 1),
        ("3,11", 3),
        ("3,11,16#163", 10),
    ],
)
def test_slip_is_where_the_text_leaves_the_right_sums(text: str, slip: int | None) -> None:
    assert first_slip("3+8+5=", text) == slip


def test_rows_of_a_step_hold_every_token_with_what_was_decided_about_it() -> None:
    run, _, _ = open_run(shrunk("asyppo"))
    result, _ = asyncio.run(run.train())
    rows = trace_rows(result, decode, 3)
    assert len(rows) == 3 and trace_rows(result, decode, 0) == []
    for row in rows:
        length = len(row["tokens"])  # type: ignore[arg-type]
        for key in (
            "advantages",
            "std",
            "log_ratio",
            "class",
            "advantage_masked",
            "entropy_filtered",
            "versions",
        ):
            assert len(row[key]) == length, key  # type: ignore[arg-type]
        assert np.array(row["values"]).shape == (2, length)
    best, worst = rows[0], rows[1]
    rewards = [one.reward for one in result.batch.groups[0].trajectories]
    assert (best["reward"], worst["reward"]) == (max(rewards), min(rewards))
    first = max(range(len(rewards)), key=rewards.__getitem__)
    start = int(result.batch.lengths[:first].sum())
    assert best["advantages"][0] == pytest.approx(float(result.decisions.advantages[start]), abs=1e-5)  # type: ignore[index]


def test_record_of_a_step_counts_ages_from_the_critics_version_and_names_masked_tokens() -> None:
    for preset, version in (("asyppo", 2), ("ppo", 1)):
        run, _, _ = open_run(shrunk(preset), lag=1)
        asyncio.run(run.train())
        result, _ = asyncio.run(run.train())
        record = critic_record(result, decode)
        assert record["critic_version"] == version, "after the update of this step, or before it"
        responses = len(result.batch.lengths)
        assert record["critic_age_histogram_responses"] == [0.0] * version + [float(responses)]
        assert len(record["value_of_right_by_tenth"]) == 10  # type: ignore[arg-type]
        counts = record["calibration_by_decile_count"]
        assert [sum(decile) for decile in counts] == [responses] * 10  # type: ignore[attr-defined]
        masked = sum(count for _, count in record["tokens_masked"])  # type: ignore[attr-defined]
        assert (masked > 0) == (preset == "asyppo")
    none, _, _ = open_run(shrunk("grpo"))
    assert critic_record(asyncio.run(none.train())[0], decode) == {}


def a_trace(text: str, values: list[float], **changes: object) -> dict[str, object]:
    size = len(text)
    return {
        "step": 3, "prompt_id": "p1", "task": "arithmetic", "prompt": "3+8+5=", "answer": "16", "reward": -1.0,
        "tokens": list(text), "values": [values, values], "advantages": [0.1] * size, "std": [0.0] * size,
        "log_ratio": [0.0] * size, "class": ["trained"] * size, "advantage_masked": [False] * size,
        "entropy_filtered": [False] * size, "versions": [1] * (size - 1) + [2], **changes,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text("")
    rows = [
        a_trace("3,12#12", [0.5, 0.5, 0.5, 0.5, -0.4, -0.5, -0.5]),
        a_trace("3,12#12", [0.5, 0.5, -0.5, -0.6, -0.6, -0.6, -0.6], prompt_id="<b>p2"),
        a_trace("3,11,16#16", [0.5] * 10, reward=1.0),
        a_trace("3,11,16#17", [0.5] * 10, abandoned=True),
    ]
    (tmp_path / "traces.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "pro'
    )
    return tmp_path


def test_slips_are_counted_against_the_largest_fall_of_value(folder: Path) -> None:
    slips = count_slips(read_traces(folder))
    assert (slips.num_slips, slips.num_at_slip, slips.num_near) == (2, 1, 2)
    assert slips.by_chance == pytest.approx(1 / 6)
    assert "in 1 of 2 wrong responses (50%; by chance 17%)" in str(slips)


def test_page_marks_slip_fall_and_version_and_escapes_what_responses_say(folder: Path) -> None:
    page = write_trace_page(folder, read_traces(folder)).read_text()
    assert "<b>p2" not in page and "&lt;b&gt;p2" in page
    assert page.count('class="t slip largest-fall"') == 3, "value, advantage and std of the first response"
    assert 'class="t new-version"' in page and "http" not in page
    assert "V -0.400, -0.400; A +0.100" in page


def test_traces_when_there_are_none_say_what_keeps_them(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no trace of prompt 'p9'; it has some of"):
        read_traces(folder, "p9")
    assert [trace.step for trace in read_traces(folder, "p1")] == [3, 3]
    (folder / "traces.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"tracking\.samples_per_step"):
        read_traces(folder)


@needs_chromium
def test_page_when_a_browser_opens_it_shows_both_signs_and_the_disagreement(folder: Path) -> None:
    rows = [a_trace("3,12#12", [0.9] * 4 + [-0.9] * 3, std=[0.0] * 4 + [0.4] * 3)]
    (folder / "traces.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_trace_page(folder, read_traces(folder))
    open_in_chromium(page, f"--screenshot={folder / 'page.png'}", "--window-size=900,700")
    pixels = np.asarray(Image.open(folder / "page.png").convert("RGB"), dtype=np.int64)[
        200:
    ]  # below the legend
    red, green, blue = pixels[..., 0], pixels[..., 1], pixels[..., 2]
    for colour, one, others in (
        ("green", green, (red, blue)),
        ("red", red, (green, blue)),
        ("violet", blue, (red, green)),
    ):
        strong = np.all([one - other > 30 for other in others], axis=0)
        assert strong.sum() > 300, f"{colour}: {strong.sum()} pixels"
