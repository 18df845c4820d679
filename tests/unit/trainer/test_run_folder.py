"""The run folder: complete files only, no silent overwriting, JSON that every reader takes."""

import json
from pathlib import Path

import pytest

from asyppo_async.config.load import config_from_tree, load_config
from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import ConfigError
from asyppo_async.trainer.run_folder import RunFolder


def config_in(folder: Path, *overrides: str) -> TrainConfig:
    return config_from_tree(
        {"actor": {"model": "a"}, "critic": {"model": "c"}},
        [f"run.folder={folder}", "run.name=x", *overrides],
    )


def test_folder_holds_the_resolved_config_and_rows(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    folder = RunFolder(config)
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


def test_folder_when_it_exists_is_refused_unless_overwriting_is_asked_for(tmp_path: Path) -> None:
    RunFolder(config_in(tmp_path)).append_step({"version": 1})
    with pytest.raises(ConfigError, match=r"exists; choose another name with --set run\.name=NAME"):
        RunFolder(config_in(tmp_path))
    folder = RunFolder(config_in(tmp_path, "run.overwrite=true"))
    assert not (folder.path / "metrics.jsonl").exists()


def test_folder_when_it_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match="cannot write the run folder"):
        RunFolder(config_in(tmp_path))
