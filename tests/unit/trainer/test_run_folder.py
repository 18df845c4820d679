"""The run folder: complete files only, no silent overwriting, JSON that every reader takes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from asyppo_async.config.load import config_from_tree, load_config
from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import ConfigError
from asyppo_async.trainer.coordinator.draws import Consideration, Draw, Fate, News
from asyppo_async.trainer.coordinator.sampler import Candidate
from asyppo_async.trainer.run_folder import RunFolder


def config_in(folder: Path, *overrides: str) -> TrainConfig:
    return config_from_tree(
        {"actor": {"model": "a"}, "critic": {"model": "c"}},
        [f"run.folder={folder}", "run.name=x", *overrides],
    )


def test_folder_holds_the_resolved_config_and_rows(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    folder = RunFolder.create(config)
    folder.append_step({"version": 1, "reward/mean": float("nan"), "histogram": [1.0, float("inf")]})
    folder.append_step({"version": 2, "reward/mean": 0.5})
    folder.write_summary({"steps": 2, "nested": {"gap": float("-inf")}})
    assert load_config(folder.path / "config.toml") == config
    rows = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [
        {"version": 1, "reward/mean": None, "histogram": [1.0, None]},
        {"version": 2, "reward/mean": 0.5},
    ]
    assert json.loads((folder.path / "summary.json").read_text()) == {"steps": 2, "nested": {"gap": None}}
    assert not list(folder.path.glob(".*")), "nothing half written"


def test_folder_when_the_ledger_has_news_lists_each_row_once(tmp_path: Path) -> None:
    candidate = Candidate(
        number=5, prompt_id="p1", epoch=0, accepted=True, acceptance=0.84, success_estimate=0.7
    )
    accepted = Consideration(candidate=candidate, draw_id=2, version=3, at_s=0.0)
    skipped = Consideration(
        candidate=replace(candidate, number=6, accepted=False, success_estimate=None),
        draw_id=None,
        version=3,
        at_s=0.0,
    )
    draw = Draw(draw_id=2, attempt=1, prompt_id="p1", epoch=0, admission_version=3)
    fate = Fate(draw=draw, outcome="dropped", reason="deadline", step=4, num_tokens=9, at_s=1.0)
    folder = RunFolder.create(config_in(tmp_path))
    folder.append_news(News(considered=(accepted, skipped), fates=(fate,)), with_candidates=True)
    folder.append_news(News(considered=(accepted,), fates=()), with_candidates=False)
    rows = [json.loads(line) for line in (folder.path / "candidates.jsonl").read_text().splitlines()]
    assert rows == [
        {
            "number": 5,
            "prompt": "p1",
            "epoch": 0,
            "accepted": True,
            "acceptance": 0.84,
            "success_estimate": 0.7,
            "draw": 2,
            "version": 3,
        },
        {**rows[0], "number": 6, "accepted": False, "success_estimate": None, "draw": None},
    ]
    (row,) = [json.loads(line) for line in (folder.path / "draws.jsonl").read_text().splitlines()]
    assert (row["draw"], row["attempt"], row["outcome"], row["reason"]) == (2, 1, "dropped", "deadline")
    assert (row["step"], row["tokens"], row["admission_version"]) == (4, 9, 3)


def test_folder_when_it_exists_is_refused_unless_overwriting_is_asked_for(tmp_path: Path) -> None:
    RunFolder.create(config_in(tmp_path)).append_step({"version": 1})
    with pytest.raises(ConfigError, match=r"exists; go on with `asyppo-train resume .*/x`, choose another"):
        RunFolder.create(config_in(tmp_path))
    folder = RunFolder.create(config_in(tmp_path, "run.overwrite=true"))
    assert not (folder.path / "metrics.jsonl").exists()


def test_folder_when_it_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match="cannot write the run folder"):
        RunFolder.create(config_in(tmp_path))
