"""Runs that are killed at random moments, frozen, or lose a part, and go on."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.integration.chaos.conftest import (
    ChaosRunner,
    ScriptedServer,
    check_lineage,
    num_steps,
    ranks_of,
    rows,
    wait_for_end_of,
    wait_for_steps,
)
from tests.integration.run.conftest import Finished


def kill_and_resume(
    runner: ChaosRunner,
    server: ScriptedServer,
    name: str,
    pauses_s: list[float],
    *arguments: str,
    patience_s: float = 150,
) -> list[int]:
    """Kill the run at random moments, each time after it has come a little further; steps at each kill."""
    process = runner.start(name, "--fleet", server.address, *arguments)
    folder = runner.folder / "runs" / name
    killed_at = []
    for kill, pause_s in enumerate(pauses_s):
        wait_for_steps(process, folder, timeout_s=patience_s)
        time.sleep(pause_s)
        process.kill()
        out, err = process.communicate(timeout=30)
        assert process.returncode == -signal.SIGKILL, (out, err)
        killed_at.append(num_steps(folder))
        if kill == 1:
            damage_newest(folder)
        process = runner.resume(name)
    done = runner.finish(process, name, timeout_s=max(240, patience_s))
    assert done.code == 0, done.err
    return killed_at


def pauses(number: int, longest_s: float, seed: int) -> list[float]:
    chance = random.Random(seed)
    return [chance.uniform(0, longest_s) for _ in range(number)]


def damage_newest(folder: Path) -> None:
    """One bit of the newest checkpoint."""
    newest = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()
    state = newest / "actor" / "state-0.safetensors"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)


@pytest.mark.report("P52")
@pytest.mark.timeout(280)
def test_run_killed_three_times_at_random_moments_trains_each_prompt_once(
    runner: ChaosRunner, server: ScriptedServer
) -> None:
    kill_and_resume(runner, server, "killed", pauses(3, 1.5, seed=5))
    folder = runner.folder / "runs" / "killed"
    done = runner.finish(runner.command("report", str(folder)), "killed")
    check_lineage(done, 40)
    assert done.summary["resumes"] == 3 and done.summary["outcome"] == "finished"
    assert list((folder / "checkpoints").glob("*.damaged")), "the damaged one was passed over"
    log = (folder / "logs" / "trainer.log").read_text()
    assert (
        "state-0.safetensors has other bytes than were written; going back to the checkpoint before it" in log
    )
    assert max(row["staleness/max"] for row in rows(folder, "metrics.jsonl")) <= 2


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_run_killed_twenty_times_over_an_epoch_of_500_prompts_trains_each_prompt_once(
    runner: ChaosRunner, server: ScriptedServer
) -> None:
    settings = ("--set", "task.num_train=500", "--set", "run.num_steps=125")
    killed_at = kill_and_resume(runner, server, "twenty", pauses(20, 6.0, seed=7), *settings, patience_s=500)
    done = runner.finish(runner.command("report", str(runner.folder / "runs" / "twenty")), "twenty")
    check_lineage(done, 500)
    assert done.summary["resumes"] == 20 and len(set(killed_at)) > 10, killed_at


@pytest.mark.report("P54")
@pytest.mark.long
@pytest.mark.timeout(900)
def test_run_when_its_ranks_and_engine_change_at_every_resume_then_it_trains_on(
    runner: ChaosRunner, server: ScriptedServer, models: Path
) -> None:
    name = "ranks"
    process = runner.start(name, "--fleet", server.address, "--set", "actor.ema_decay=0.5")
    folder = runner.folder / "runs" / name
    zero = (
        "--set",
        "actor.backend=deepspeed",
        "--set",
        "actor.zero_stage=3",
        "--set",
        "actor.zero_whole_below=0",
    )
    for changes in (
        (*zero, "--set", "actor.num_ranks=2"),
        ("--set", "actor.num_ranks=3", "--set", "critic.num_ranks=2"),
        ("--set", "actor.num_ranks=1", "--set", "actor.backend=plain"),
    ):
        wait_for_steps(process, folder, 2, timeout_s=300)
        process.kill()
        process.communicate(timeout=30)
        process = runner.resume(name, *changes)
    done = runner.finish(process, name, timeout_s=400)
    assert done.code == 0, done.err
    check_lineage(done, 40)
    assert done.summary["resumes"] == 3
    check_average(runner, done, models)


def check_average(runner: ChaosRunner, done: Finished, models: Path) -> None:
    """What `export --ema` writes lies behind the last weights, nearer to them than where the run began."""
    weights = {"first": load_file(models / "actor" / "model.safetensors")}
    for name, options in (("last", ()), ("average", ("--ema",))):
        target = runner.folder / name
        command = runner.command("export", str(done.folder), "--to", str(target), *options)
        exported = runner.finish(command, name)
        assert exported.code == 0, exported.err
        weights[name] = load_file(target / "model" / "model.safetensors")
    from_last = {
        name: sum(
            float((other[key].float() - tensor.float()).norm()) for key, tensor in weights["last"].items()
        )
        for name, other in weights.items()
    }
    assert 0 < from_last["average"] < from_last["first"], from_last


@pytest.mark.timeout(200)
def test_run_with_restarts_comes_back_by_itself_when_ranks_are_killed_and_frozen(
    runner: ChaosRunner, server: ScriptedServer
) -> None:
    name = "restarts"
    process = runner.start(name, "--fleet", server.address, "--restarts", "2")
    folder = runner.folder / "runs" / name
    for rank, number in (("actor-0", signal.SIGKILL), ("critic-1-0", signal.SIGSTOP)):
        wait_for_steps(process, folder, 2)
        victim = ranks_of(process)[rank]
        os.kill(victim, number)
        wait_for_end_of(victim, 60)
    done = runner.finish(process, name, timeout_s=150)
    assert done.code == 0, done.err
    check_lineage(done, 40)
    assert done.summary["resumes"] == 2
    assert (
        done.out.count("going back to the last checkpoint") >= 2
        and "was killed by signal SIGKILL" in done.out
    )
    assert server.process.poll() is None, "the fleet stays up"
