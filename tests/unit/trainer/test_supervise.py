"""What a restart mends, and what a resume refuses before anything is started."""

import asyncio
from pathlib import Path

import pytest

from asyppo_async.config.load import config_from_tree, dump_config
from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import (
    AsyppoError,
    ConfigError,
    FleetMismatch,
    FleetUnavailable,
    Stalled,
    TaskError,
    TooManyLost,
    TrainingDiverged,
    WeightSyncError,
    WorkerError,
)
from asyppo_async.trainer.supervise import is_mended_by_restart, resume_training


@pytest.mark.parametrize(
    ("error", "is_mended"),
    [
        (WorkerError("actor rank 0 was killed"), True),
        (FleetUnavailable("gone"), True),
        (WeightSyncError("cut"), True),
        (Stalled("no progress"), True),
        (TooManyLost("rewards"), False),
        (TrainingDiverged("nan"), False),
        (TaskError("no data"), False),
        (ConfigError("wrong"), False),
        (FleetMismatch("another model"), False),
        (RuntimeError("a bug of ours"), False),
    ],
)
def test_restart_mends_what_has_died_and_not_what_would_come_again(error: Exception, is_mended: bool) -> None:
    assert is_mended_by_restart(error) == is_mended
    beside = ExceptionGroup("run", [ExceptionGroup("parts", [error]), WorkerError("rank 1 is silent")])
    assert is_mended_by_restart(beside) == is_mended, "one thing that would come again is enough"


def run_folder(folder: Path, *overrides: str) -> TrainConfig:
    tree = {"actor": {"model": "a"}, "critic": {"model": "c"}}
    config = config_from_tree(tree, [f"run.folder={folder.parent}", f"run.name={folder.name}", *overrides])
    folder.mkdir()
    (folder / "config.toml").write_text(dump_config(config))
    return config


def resume(folder: Path, *overrides: str) -> None:
    asyncio.run(resume_training(folder, list(overrides), "INFO"))


def test_resume_of_what_is_no_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run folder"):
        resume(tmp_path)


@pytest.mark.parametrize(
    "override", ["critic.count=3", "actor.dtype=bfloat16", "batch.group_size=4", "run.seed=7"]
)
def test_resume_with_a_setting_that_the_saved_state_depends_on_is_refused(
    tmp_path: Path, override: str
) -> None:
    run_folder(tmp_path / "x")
    name = override.split("=", maxsplit=1)[0]
    with pytest.raises(ConfigError, match=f"a resumed run keeps {name} = "):
        resume(tmp_path / "x", override)


def test_resume_with_a_setting_that_may_change_gets_as_far_as_the_model(tmp_path: Path) -> None:
    run_folder(tmp_path / "x")
    with pytest.raises(AsyppoError, match=r"actor\.model: there is no model folder"):
        resume(
            tmp_path / "x",
            "run.num_steps=200",
            "actor.learning_rate=1e-5",
            "actor.num_ranks=4",
            "critic.num_ranks=2",
        )
