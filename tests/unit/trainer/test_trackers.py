"""The sinks of a run get every number under its name, and an unusable one is an error before anything starts."""

import math
from pathlib import Path

import numpy as np
import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from asyppo_async.config.load import config_from_tree
from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import ConfigError
from asyppo_async.trainer.trackers import open_trackers

ROW = {"version": 3, "reward/mean": 0.25, "gap": math.nan, "trace": [{"phase": "x"}], "server": "a:1"}


def config_with(*overrides: str) -> TrainConfig:
    return config_from_tree({"actor": {"model": "a"}, "critic": {"model": "c"}}, list(overrides))


def test_tensorboard_gets_the_numbers_at_their_version(tmp_path: Path) -> None:
    with open_trackers(config_with(), tmp_path, "x-1") as trackers:
        trackers.log(ROW, 3)
        trackers.log({"accuracy": 0.5}, 4, prefix="evaluation/")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"reward/mean", "gap", "evaluation/accuracy"}
    (event,) = events.Scalars("reward/mean")
    assert (event.step, event.value) == (3, 0.25)
    assert np.isnan(events.Scalars("gap")[0].value)


def test_wandb_when_offline_leaves_a_run_to_sync(tmp_path: Path) -> None:
    config = config_with("tracking.wandb=offline", "tracking.tensorboard=false", "run.name=x")
    with open_trackers(config, tmp_path, "a/x:1") as trackers:
        trackers.log(ROW, 3)
        run = wandb.run
        assert run is not None and run.name == "x" and run.id == "a-x-1" and run.config["run"]["name"] == "x"
    wandb.teardown()  # its own process writes the file, at the latest when it ends
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"reward/mean" in file.read_bytes()
    assert not (tmp_path / "tensorboard").exists()


def test_wandb_when_it_cannot_start_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:1")
    config = config_with("tracking.wandb=online", "tracking.tensorboard=false")
    with (
        pytest.raises(ConfigError, match="Weights & Biases did not start"),
        open_trackers(config, tmp_path, "x-1"),
    ):
        pass
