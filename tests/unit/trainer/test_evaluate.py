"""Which model and which settings `asyppo-train eval` takes, and what it refuses."""

from pathlib import Path

import pytest

from asyppo_async.errors import ConfigError
from asyppo_async.trainer.evaluate import evaluation_config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "settings.toml"
    file.write_text(
        'preset = "asyppo"\n[actor]\nmodel = "initial"\n[critic]\nmodel = "c"\n[run]\nname = "x"\n'
    )
    return file


def a_run(config: Path, *models: str) -> Path:
    run = config.parent / "run"
    for name in models:
        (run / name).mkdir(parents=True)
    run.mkdir(exist_ok=True)
    (run / "config.toml").write_text(config.read_text())
    return run


def test_eval_of_a_run_takes_its_settings_its_last_model_and_no_critics(config: Path) -> None:
    run = a_run(config, "model", "best")
    settings = evaluation_config(run, None, False, ["evaluation.samples_per_prompt=16"])
    assert settings.actor.model == run / "model" and settings.critic.count == 0
    assert settings.run.name == "x-eval" and settings.evaluation.samples_per_prompt == 16
    assert evaluation_config(run, None, True, []).actor.model == run / "best"


def test_eval_of_a_model_takes_the_settings_that_are_named(config: Path) -> None:
    model = config.parent / "m"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert evaluation_config(model, config, False, []).actor.model == model
    with pytest.raises(ConfigError, match="--config"):
        evaluation_config(model, None, False, [])


def test_eval_when_there_is_no_such_model_says_why(config: Path) -> None:
    run = a_run(config)
    with pytest.raises(ConfigError, match="has no model/ \\(it has not ended\\)"):
        evaluation_config(run, None, False, [])
    with pytest.raises(ConfigError, match="keep_best_by"):
        evaluation_config(run, None, True, [])
    with pytest.raises(ConfigError, match="neither a run folder"):
        evaluation_config(config.parent / "nowhere", None, False, [])
