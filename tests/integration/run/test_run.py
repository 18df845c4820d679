"""Runs as a user starts them. The order matters: one server lives through them and is killed in the last one."""

import json
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

    assert [row["version"] for row in done.rows] == [1, 2, 3, 4, 5, 6]
    spans = [span for row in done.rows for span in row["trace"]]
    (actor,) = [span for span in done.rows[1]["trace"] if span["phase"] == "actor_train"]
    ahead = [span for span in done.rows[1]["trace"] if span["phase"] == "critic_train"]
    assert {span["step"] for span in ahead} == {actor["step"] + 1}, "critics are one batch ahead"
    assert all(span["start_s"] < actor["end_s"] and actor["start_s"] < span["end_s"] for span in ahead)
    assert sum(span["phase"] == "critic_train" for span in spans) == 2 * 6, (
        "each batch trained once by each critic"
    )
    evaluations = [json.loads(line) for line in (done.folder / "evaluations.jsonl").read_text().splitlines()]
    assert [row["version"] for row in evaluations][::2] == [0, 6] and len(evaluations) == 3
    assert load_config(done.folder / "config.toml").run.num_steps == 6
    assert AutoModelForCausalLM.from_pretrained(done.folder / "model").config.num_hidden_layers == 4


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--set", "run.num_step=3"), "unknown key 'run.num_step'; did you mean 'num_steps'?"),
        (
            ("--set", "staleness.max_staleness=-1"),
            "staleness.max_staleness: Input should be greater than or equal to 0",
        ),
        (("--set", "actor.model=no/such/folder"), "actor.model: there is no model folder no/such/folder"),
        (("--set", "task.name=arithmetics"), "arithmetic"),
        (
            ("--fleet", "127.0.0.1:1", "--set", "run.join_timeout_s=1"),
            "fleet server 127.0.0.1:1 was not ready within 1 s",
        ),
        (("--set", "sampling.max_tokens=100000"), "exceed the"),
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


def test_run_when_the_critic_has_another_vocabulary_names_both(runner: Runner, tmp_path: Path) -> None:
    other = tmp_path / "critic"
    other.mkdir()
    for file in (runner.models / "critic").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 1}))
    done = runner.run("vocabulary", "--set", f"critic.model={other}")
    assert done.code == 1 and "has another vocabulary than actor.model" in done.err and str(other) in done.err


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
    assert server.process.poll() is None, "the server is not the run's to end"


def test_run_when_its_folder_exists_is_refused(runner: Runner, server: Server) -> None:
    done = runner.run("interrupted", "--fleet", server.address)
    assert done.code == 1 and "run.overwrite=true" in done.err
    assert done.summary["outcome"] == "interrupted", "nothing of the old run was touched"


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
