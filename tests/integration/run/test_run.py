"""Runs as a user starts them. The order matters: one server lives through them and is killed in the last one."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from asyppo_async.config.load import load_config
from tests.integration.run.conftest import Runner, Server

pytestmark = pytest.mark.engine

SUMMARY_KEYS = {
    "accuracy_start", "accuracy_end", "accuracy_samples", "steps", "max_staleness_bound", "max_staleness_seen",
    "groups_trained", "groups_dropped", "tokens_generated", "tokens_trained", "logprob_gap_fresh_mean",
    "logprob_gap_fresh_tokens", "publications", "publication_seconds_mean", "wall_seconds",
}  # fmt: skip


def test_run_with_an_embedded_fleet_trains_asynchronously_to_the_end(runner: Runner) -> None:
    settings = ["run.num_steps=6", "staleness.max_staleness=2", "algorithm.schedule=critic_ahead"]
    settings += ["evaluation.every_steps=3", "staleness.lead=saturated"]
    done = runner.run("embedded", *(part for setting in settings for part in ("--set", setting)))
    assert done.code == 0, done.err
    summary = done.summary
    assert summary.keys() >= SUMMARY_KEYS and summary["outcome"] == "finished"
    assert summary["steps"] == 6 and summary["publications"] == 7
    assert summary["groups_trained"] == 24 and summary["groups_dropped"] == summary["groups_unfinished"] == 0
    assert summary["tokens_trained"] <= summary["tokens_generated"]
    assert 0 < summary["max_staleness_seen"] <= summary["max_staleness_bound"] == 2
    assert summary["logprob_gap_fresh_mean"] < 1e-4 and summary["logprob_gap_fresh_tokens"] > 0
    assert summary["accuracy_samples"] == 16 and summary["accuracy_start"] is not None

    draws = [json.loads(line) for line in (done.folder / "draws.jsonl").read_text().splitlines()]
    assert sorted(row["draw"] for row in draws if row["outcome"] == "trained") == list(range(24))
    assert [row["version"] for row in done.rows] == [1, 2, 3, 4, 5, 6]
    spans = [span for row in done.rows for span in row["trace"]]
    (actor,) = [span for span in done.rows[1]["trace"] if span["phase"] == "actor_train"]
    ahead = [span for span in done.rows[1]["trace"] if span["phase"] == "critic_train"]
    assert {span["step"] for span in ahead} == {actor["step"] + 1}, "critics are one batch ahead"
    assert all(span["start_s"] < actor["end_s"] and actor["start_s"] < span["end_s"] for span in ahead)
    assert sum(span["phase"] == "critic_train" for span in spans) == 2 * 6, (
        "each batch trained once by each critic"
    )
    assert (done.folder / "report.html").stat().st_size > 1_000_000 and "report.html" in done.out
    assert len((done.folder / "samples.jsonl").read_text().splitlines()) == 2 * 6
    assert list((done.folder / "tensorboard").iterdir())
    evaluations = [json.loads(line) for line in (done.folder / "evaluations.jsonl").read_text().splitlines()]
    assert [row["version"] for row in evaluations][::2] == [0, 6] and len(evaluations) == 3
    assert load_config(done.folder / "config.toml").run.num_steps == 6
    assert AutoModelForCausalLM.from_pretrained(done.folder / "model").config.num_hidden_layers == 4


def test_export_of_the_last_checkpoint_is_what_the_run_wrote_at_its_end(runner: Runner) -> None:
    run, target = runner.folder / "runs" / "embedded", runner.folder / "exported"
    process = runner.command("export", str(run), "--step", "77", "--to", str(target))
    refused = runner.finish(process, "embedded")
    assert (
        refused.code == 1 and "no checkpoint of step 77; it has of: 6" in refused.err and not target.exists()
    )
    done = runner.finish(runner.command("export", str(run), "--to", str(target)), "embedded")
    assert done.code == 0, done.err
    written = sorted(
        path.relative_to(run) for part in ("model", "critics") for path in (run / part).rglob("*.*")
    )
    assert written == sorted(path.relative_to(target) for path in target.rglob("*.*"))
    assert sum(path.suffix == ".safetensors" for path in written) == 1 + 2 * 2
    for path in written:
        assert (target / path).read_bytes() == (run / path).read_bytes(), path


def test_run_with_max_staleness_0_on_a_server_of_its_own_is_synchronous(
    runner: Runner, server: Server
) -> None:
    sets = (
        "--set",
        "run.num_steps=3",
        "--set",
        "staleness.max_staleness=0",
        "--set",
        "algorithm.schedule=pre",
    )
    done = runner.run("synchronous", "--fleet", server.address, *sets)
    assert done.code == 0, done.err
    assert done.summary["max_staleness_seen"] == 0
    assert (
        done.summary["tokens_generated"] == done.summary["tokens_trained"] + done.summary["tokens_rejected"]
    )
    for row in done.rows:
        assert row["staleness/max"] == 0 and row["staleness/mixed_version_share"] == 0
        assert row["mismatch/gap_mean_staleness_0"] < 1e-4, (
            "what was sampled at v is scored by the same weights"
        )


def test_eval_of_a_run_publishes_its_model_and_measures_it(runner: Runner, server: Server) -> None:
    result = runner.folder / "eval.json"
    run = runner.folder / "runs" / "synchronous"
    process = runner.command("eval", str(run), "--fleet", server.address, "--json", str(result))
    done = runner.finish(process, "synchronous-eval")
    assert done.code == 0, done.err
    figures = json.loads(result.read_text())
    assert (figures["prompts"], figures["samples"], figures["version"]) == (8, 16, 0)
    assert figures["pass_at"].keys() == {"1", "2"} and figures["accuracy"] == figures["pass_at"]["1"]
    assert "avg@2" in done.out and "greedy" in done.out
    (row,) = (done.folder / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(row)["model"] == str(run / "model")


OWN_REWARDS = """
import time

def moody(row, response):
    assert set(row) == {"question", "level"}, row
    if len(response) % 5 == 2:
        time.sleep(1e6)
    if len(response) % 3 == 1:
        raise KeyError("no reward for every third length")
    return (len(response) % 7) / 6

def broken(row, response):
    return "1.0"
"""


def on_own_rewards(runner: Runner, folder: Path, reward: str) -> Path:
    """A configuration with a data set of its own whose responses a function of the user scores, and a second task."""
    (folder / "own_rewards.py").write_text(OWN_REWARDS)
    rows = [{"question": f"{n}+1=", "level": n} for n in range(100)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = f"""
[[task.mix]]
name = "data"
label = "own"
weight = 3
chat_template = "none"
data = {{ path = "{folder / "rows.jsonl"}", prompt_column = "question", reward = "own_rewards:{reward}" }}
num_heldout = 4
[[task.mix]]
name = "arithmetic"
num_train = 50
num_heldout = 4
"""
    before, task = runner.config.read_text().split("[task]")
    config = folder / "own.toml"
    config.write_text(before + own + "[sampling]" + task.split("[sampling]")[1])
    return config


@pytest.mark.long
def test_run_on_a_mix_with_an_own_reward_loses_what_it_fails_on_and_says_what_each_task_earned(
    runner: Runner, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    config = on_own_rewards(runner, tmp_path, "moody")
    sets = ("--set", "run.num_steps=3", "--set", "task.reward_timeout_s=0.3")
    done = runner.run("mix", "--fleet", server.address, *sets, config=config)
    assert done.code == 0, done.err
    assert {label: row["reward"] for label, row in done.summary["tasks"].items()} == {
        "own": "R = 2 s - 1 of a score s in [0, 1]",
        "arithmetic": "R = 2 s - 1 of a score s in [0, 1]",
    }
    for reason in ("failed_reward", "late_reward"):
        assert done.summary["responses_lost"][reason] > 0 and done.rows[-1][f"lost/{reason}"] > 0
    earned = {name for row in done.rows for name in row if name.startswith("reward/mean_")}
    assert earned == {"reward/mean_own", "reward/mean_arithmetic"}
    (first, *_) = (done.folder / "evaluations.jsonl").read_text().splitlines()
    assert set(json.loads(first)["accuracy_by_task"]) == {"own", "arithmetic"}
    log = (done.folder / "logs" / "trainer.log").read_text()
    assert "the reward failed: KeyError: 'no reward for every third length'" in log


@pytest.mark.long
def test_run_when_every_reward_fails_ends_with_the_reason(
    runner: Runner, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    config = on_own_rewards(runner, tmp_path, "broken")
    done = runner.run("broken-reward", "--fleet", server.address, config=config)
    assert done.code == 1
    errors = [line for line in done.err.splitlines() if line.startswith("asyppo-train: ")]
    assert len(errors) == 1 and "rewards of task own failed, and none was good before" in errors[0], done.err
    assert "own_rewards:broken must return a finite number in 0..1, got str '1.0'" in errors[0]
    assert "Traceback" not in done.err and done.summary["outcome"] == "failed"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--set", "run.num_step=3"), "unknown key 'run.num_step'; did you mean 'num_steps'?"),
        (
            ("--fleet", "127.0.0.1:1", "--set", "run.join_timeout_s=1"),
            "fleet server 127.0.0.1:1 was not ready within 1 s",
        ),
    ],
)
def test_run_when_the_input_is_wrong_says_so_in_one_line(
    runner: Runner, arguments: tuple[str, ...], words: str
) -> None:
    started_s = time.monotonic()
    done = runner.run(f"wrong{abs(hash(arguments))}", *arguments)
    assert done.code == 1
    errors = [line for line in done.err.splitlines() if line.startswith("asyppo-train: ")]
    assert len(errors) == 1 and words in errors[0], done.err
    assert "Traceback" not in done.err
    assert time.monotonic() - started_s < 60


@pytest.mark.long
def test_run_when_the_critic_has_another_vocabulary_names_both(runner: Runner, tmp_path: Path) -> None:
    other = tmp_path / "critic"
    other.mkdir()
    for file in (runner.models / "critic").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 1}))
    done = runner.run("vocabulary", "--set", f"critic.model={other}")
    assert done.code == 1 and "has another vocabulary than actor.model" in done.err and str(other) in done.err


@pytest.mark.long
def test_run_when_the_server_has_another_model_names_the_difference(
    runner: Runner, server: Server, tmp_path: Path
) -> None:
    config = tmp_path / "other.toml"
    text = runner.config.read_text().replace(f'"{runner.models / "actor"}"', f'"{runner.models / "critic"}"')
    config.write_text(text)
    done = runner.run("mismatch", "--fleet", server.address, config=config)
    assert done.code == 1
    assert f"server {server.address}" in done.err and "model architecture is" in done.err


def test_run_when_interrupted_ends_in_order_and_leaves_a_valid_folder(runner: Runner, server: Server) -> None:
    process = runner.start("interrupted", "--fleet", server.address, "--set", "run.num_steps=500")
    folder = runner.folder / "runs" / "interrupted"
    wait_for_steps(folder, 2)
    process.send_signal(signal.SIGINT)
    done = runner.finish(process, "interrupted", 60)
    assert done.code == 130, done.err
    assert done.summary["outcome"] == "interrupted" and done.summary["steps"] == len(done.rows) >= 2
    assert done.summary["accuracy_start"] is not None and done.summary["accuracy_end"] is None
    assert (folder / "model" / "config.json").exists()
    assert f"go on with: asyppo-train resume {folder}" in done.out
    assert server.process.poll() is None, "the server is not the run's to end"


def test_run_when_its_folder_exists_is_refused(runner: Runner, server: Server) -> None:
    done = runner.run("interrupted", "--fleet", server.address)
    assert done.code == 1 and "run.overwrite=true" in done.err
    assert done.summary["outcome"] == "interrupted", "nothing of the old run was touched"


@pytest.mark.report("P52")
def test_run_resumed_then_killed_and_resumed_again_trains_each_draw_once_to_the_end(
    runner: Runner, server: Server
) -> None:
    folder = runner.folder / "runs" / "interrupted"
    stopped_at = len((folder / "metrics.jsonl").read_text().splitlines())
    settings = (f"run.num_steps={stopped_at + 3}", "checkpoint.every_steps=1", "evaluation.every_steps=0")
    sets = [part for setting in settings for part in ("--set", setting)]
    process = runner.command("resume", str(folder), *sets)
    wait_for_steps(folder, stopped_at + 2)
    process.kill()
    out, _ = process.communicate(timeout=30)
    assert f"resuming {folder} from step {stopped_at}" in out
    done = runner.finish(runner.command("resume", str(folder)), "interrupted")
    assert done.code == 0, done.err
    summary, rows = done.summary, [row for row in done.rows if not row.get("abandoned")]
    assert summary["outcome"] == "finished" and summary["resumes"] == 2
    assert [row["version"] for row in rows] == list(range(1, stopped_at + 4)) and summary["steps"] == len(
        rows
    )
    lines = (folder / "draws.jsonl").read_text().splitlines()
    draws = [row for row in map(json.loads, lines) if not row.get("abandoned")]
    trained = [row["draw"] for row in draws if row["outcome"] == "trained"]
    assert len(trained) == len(set(trained)) == 4 * len(rows) == summary["groups_trained"]
    assert summary["logprob_gap_fresh_mean"] < 1e-4, (
        "the weights that were restored are those that are served"
    )
    assert summary["accuracy_start"] is not None and summary["accuracy_end"] is not None
    assert all(row["staleness/max"] <= 1 for row in rows)


def test_run_when_its_server_is_killed_ends_with_an_error_that_names_it(
    runner: Runner, server: Server
) -> None:
    process = runner.start("killed", "--fleet", server.address, "--set", "run.num_steps=500")
    wait_for_steps(runner.folder / "runs" / "killed", 2)
    server.process.kill()
    server.process.wait()
    done = runner.finish(process, "killed", 60)
    assert done.code == 1
    errors = [line for line in done.err.splitlines() if line.startswith("asyppo-train: ")]
    assert errors and any(server.address in line for line in errors), done.err
    assert done.summary["outcome"] == "failed" and server.address in str(done.summary["error"])
    assert "Traceback" not in done.err


def wait_for_steps(folder: Path, steps: int) -> None:
    deadline_s = time.monotonic() + 100
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
        assert time.monotonic() < deadline_s, f"{folder.name} made no {steps} steps in 100 s"
        time.sleep(0.1)
