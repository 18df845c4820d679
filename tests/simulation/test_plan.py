"""The planning tool: predictions that can be worked out by hand, its errors, and figures taken from a run."""

import json
import math
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from asyppo_async.config.load import config_from_tree, dump_config
from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import ConfigError, Stalled
from asyppo_async.trainer.coordinator.simulate.measured import assume, log_sigma, read_run
from asyppo_async.trainer.coordinator.simulate.plan import (
    Division,
    advice,
    best,
    division_of,
    divisions,
    predict,
)

MODELS: dict[str, object] = {"actor": {"model": "a"}, "critic": {"model": "c"}}


def config_of(*overrides: str) -> TrainConfig:
    """Groups of 2 x 100 tokens, B = 4: 800 tokens a batch; 8 slots of 10 tokens/s each, whatever the load."""
    base = [
        "batch.prompts=4",
        "batch.group_size=2",
        "sampling.max_tokens=100",
        "staleness.lead=saturated",
        "fleet.max_num_seqs=8",
        "simulate.median_tokens=100",
        "simulate.prompt_sigma=0",
        "simulate.member_sigma=0",
        "simulate.alone_tokens_per_s=10",
        "simulate.full_tokens_per_s=80",
        "simulate.prompt_tokens=0",
        "simulate.train_tokens_per_s=100",
        "simulate.step_overhead_s=0",
        "simulate.publication_s=1",
        "simulate.pause_s=0",
    ]
    return config_from_tree(dict(MODELS), [*base, *overrides])


def test_step_when_synchronous_is_generation_and_training_and_publication() -> None:
    config = config_of("staleness.max_staleness=0")
    figures = predict(config, division_of(config)).figures
    assert figures.step_s == pytest.approx(10 + 8 + 1)
    assert figures.trainer_share == pytest.approx(8 / 19)
    assert figures.wait_share == pytest.approx(10 / 19)
    assert figures.publication_share == pytest.approx(1 / 19)
    assert figures.staleness_histogram == (1.0,)
    assert figures.trained_tokens_per_s == pytest.approx(800 / 19)
    assert figures.length_ratio == pytest.approx(1.0)


def test_step_when_asynchronous_is_the_slower_side_alone() -> None:
    slow_trainer = config_of("staleness.max_staleness=2", "simulate.train_tokens_per_s=50")
    figures = predict(slow_trainer, division_of(slow_trainer)).figures
    assert figures.step_s == pytest.approx(16 + 1)
    assert figures.wait_share == pytest.approx(0.0, abs=1e-6)
    slow_fleet = config_of("staleness.max_staleness=2", "simulate.train_tokens_per_s=1000")
    figures = predict(slow_fleet, division_of(slow_fleet)).figures
    assert figures.step_s == pytest.approx(10.0, rel=0.01)
    assert figures.fleet_tokens_share == pytest.approx(1.0, abs=0.01)


def test_prompts_when_they_have_to_be_read_delay_the_batch_by_their_tokens() -> None:
    plain = config_of("staleness.max_staleness=0")
    with_prompts = config_of(
        "staleness.max_staleness=0", "simulate.prompt_tokens=50", "simulate.prefill_tokens_per_s=100"
    )
    difference_s = (
        predict(with_prompts, division_of(plain)).figures.step_s
        - predict(plain, division_of(plain)).figures.step_s
    )
    assert difference_s == pytest.approx(4 * 50 / 100)


def test_division_when_gpus_are_split_balances_both_sides() -> None:
    """12 GPUs: with s servers generation takes 10 / s seconds a batch of eight and training 8 / (12 - s)."""
    config = config_of(
        "staleness.max_staleness=4",
        "batch.prompts=40",
        "simulate.num_servers=2",
        "simulate.trainer_gpus=10",
        "simulate.publication_s=0",
    )
    tried = [predict(config, division) for division in divisions(config)]
    assert all(one.division.num_servers + one.division.trainer_gpus == 12 for one in tried)
    assert best(tried).division == Division(num_servers=7, trainer_gpus=5)
    assert best(tried).figures.step_s == pytest.approx(8000 / 500, rel=0.03)


def test_advice_when_a_setting_limits_the_run_names_it() -> None:
    config = config_of("staleness.max_concurrent_groups=1", "simulate.train_tokens_per_s=1000")
    lines = advice(config, predict(config, division_of(config)))
    assert any("staleness.max_concurrent_groups = 1" in line for line in lines)
    late = config_of("fleet.group_deadline_s=9", "staleness.max_replacements_per_step=20")
    with pytest.raises(Stalled, match="deadline"):
        predict(late, division_of(late))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("simulate.full_tokens_per_s=100", r"full_tokens_per_s.*between 10 and 80 tokens/s.*got 100"),
        ("simulate.median_tokens=101", r"median_tokens = 101 exceeds sampling.max_tokens = 100"),
    ],
)
def test_assumptions_when_they_contradict_are_refused_by_name(override: str, message: str) -> None:
    config = config_of(override)
    with pytest.raises(ConfigError, match=message):
        predict(config, division_of(config))


def test_log_sigma_when_mean_and_p95_are_those_of_a_log_normal_is_its_own() -> None:
    for sigma in (0.0, 0.3, 1.0):
        mean, p95 = math.exp(sigma**2 / 2), math.exp(1.6449 * sigma)
        assert log_sigma(mean, p95) == pytest.approx(sigma, abs=1e-9)
    assert log_sigma(10.0, 8.0) == 0.0


def write_run(folder: Path, config: TrainConfig, *, num_steps: int = 8) -> None:
    """A run whose first batch took 10 s to generate and whose steps train for 16 s and publish for 1 s."""
    (folder / "config.toml").write_text(dump_config(config))
    row = {
        "time/wait_s": 0.0,
        "time/publication_s": 1.0,
        "weights/commit_s": 0.25,
        "batch/tokens": 800.0,
        "response/length_mean_tokens": 100.0,
        "response/length_p95_tokens": 100.0,
        "time/step_s": 17.0,
        "rollout/in_flight_mean_s": 10.0,
    }
    rows = [{**row, "version": 1, "time/wait_s": 10.0, "time/step_s": 27.0}]
    rows += [{**row, "version": 1 + index} for index in range(1, num_steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_run_when_its_figures_are_taken_is_predicted(tmp_path: Path) -> None:
    # The fleet was assumed four times as fast as it is; how long groups were in flight says how fast it is.
    write_run(
        tmp_path,
        config_of(
            "staleness.max_staleness=2",
            "simulate.alone_tokens_per_s=40",
            "simulate.full_tokens_per_s=320",
        ),
    )
    measured = read_run(tmp_path)
    config = assume(measured.config, measured)
    assert config.simulate.full_tokens_per_s == pytest.approx(80, rel=0.01)
    assert config.simulate.train_tokens_per_s == pytest.approx(50)
    assert predict(config, division_of(config)).figures.median_step_s == pytest.approx(17.0)
    assert measured.is_of(config)
    # What the run did not try: the same machine, synchronous.
    synchronous = config.model_copy(
        update={"staleness": config.staleness.model_copy(update={"max_staleness": 0})}
    )
    assert not measured.is_of(synchronous)
    assert predict(synchronous, division_of(config)).figures.median_step_s == pytest.approx(27.0, rel=0.01)


def test_run_when_it_is_too_short_or_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no config file"):
        read_run(tmp_path)
    write_run(tmp_path, config_of(), num_steps=3)
    with pytest.raises(ConfigError, match="has 3 steps; at least 4"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="takes the folder of a run"):
        read_run(tmp_path)


def test_command_when_run_prints_tables_and_writes_both_files_without_torch(tmp_path: Path) -> None:
    config = config_of("simulate.num_servers=2", "simulate.trainer_gpus=2", "simulate.steps=6")
    (tmp_path / "run.toml").write_text(dump_config(config))
    code = (
        "import sys; from asyppo_async.trainer.cli import main\n"
        "sys.argv = ['asyppo-train', 'simulate', 'run.toml', '--json', 'out.json', '--plot', 'out.svg']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules and 'grpc' not in sys.modules"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "simulated, not measured" in result.stdout and "Dividing the GPUs" in result.stdout
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["prediction"]["division"] == {"num_servers": 2, "trainer_gpus": 2}
    assert written["recommended"]["num_servers"] in (1, 2, 3)
    root = ElementTree.parse(tmp_path / "out.svg").getroot()
    assert root.tag.endswith("svg")


def test_command_when_nothing_is_named_says_what_to_name() -> None:
    program = Path(sys.executable).with_name("asyppo-train")
    result = subprocess.run([program, "simulate"], capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 1
    assert result.stderr.strip() == "asyppo-train: name a CONFIG.toml, or a run with --from-run"
