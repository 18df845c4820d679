"""Real processes, gRPC, ZMQ and torch groups, on a scripted engine: the faults are not the engine's."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.run.conftest import ROOT, Finished, Runner, random_models

SETTINGS = """
preset = "asyppo"
[run]
folder = "{runs}"
num_steps = 10
join_timeout_s = 60
stall_after_s = 5
fail_after_s = 60
silent_after_s = 5
[actor]
model = "{models}/actor"
learning_rate = 1e-4
mini_batches = 1
num_threads = 1
[critic]
model = "{models}/critic"
mini_batches = 1
num_threads = 1
[algorithm]
mismatch = "none"
[task]
num_train = 40
num_heldout = 2
reward_processes = 1
[sampling]
max_tokens = 24
[batch]
prompts = 4
group_size = 4
[staleness]
max_staleness = 2
max_attempts = 20
[weights]
probe_tolerance = 1e9
[evaluation]
samples_per_prompt = 1
greedy = false
[checkpoint]
every_steps = 1
[tracking]
tensorboard = false
report = false
"""
"""One epoch of 40 prompts. What the scripted engine says has nothing to do with the model, so no gap is too large."""


class ChaosRunner(Runner):
    """`asyppo-train` with settings of its own."""

    def __init__(self, folder: Path, models: Path) -> None:
        super().__init__(folder, models)
        self.config.write_text(SETTINGS.format(runs=folder / "runs", models=models))

    def resume(self, name: str, *arguments: str) -> "subprocess.Popen[str]":
        return self.command("resume", str(self.folder / "runs" / name), *arguments)


class ScriptedServer:
    """One server process at a port that stays the same when it is started again."""

    def __init__(self, models: Path, folder: Path, delta_s: float, within: tuple[str, ...] = ()) -> None:
        """`within`: a command that the server's own is handed to."""
        self._within = within
        self._models = models
        self._folder = folder
        self._delta_s = delta_s
        self.port = 0
        self.process = self._start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def restart(self) -> None:
        """After its end."""
        self.process = self._start()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()

    def _start(self) -> "subprocess.Popen[bytes]":
        self._folder.mkdir(exist_ok=True)
        ready = self._folder / "ready.json"
        ready.unlink(missing_ok=True)
        command = [*self._within, sys.executable, "-m", "tests.integration.chaos.scripted_server"]
        command += [str(self._models / "actor"), str(ready), str(self.port), str(self._delta_s)]
        with (self._folder / "server.log").open("ab") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        wait_until(ready.exists, 60, "the scripted server is ready", alive=lambda: process.poll() is None)
        self.port = json.loads(ready.read_text())["port"]
        return process


def wait_until(
    holds: Callable[[], bool], timeout_s: float, what: str, alive: Callable[[], bool] = lambda: True
) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert alive(), f"it ended before {what}"
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


def num_steps(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    return len([line for line in lines if "abandoned" not in line])


def wait_for_steps(
    process: "subprocess.Popen[str]", folder: Path, more: int = 1, timeout_s: float = 150
) -> None:
    """Until the run has made `more` steps than now."""
    wanted = num_steps(folder) + more
    wait_until(
        lambda: num_steps(folder) >= wanted, timeout_s, f"step {wanted}", alive=lambda: process.poll() is None
    )


def wait_for_end_of(pid: int, timeout_s: float) -> None:
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), timeout_s, f"the end of process {pid}")


def rows(folder: Path, name: str) -> list[dict[str, object]]:
    """Those of the lineage of the final weights."""
    lines = (folder / name).read_text().splitlines()
    return [row for row in map(json.loads, lines) if not row.get("abandoned")]


def ranks_of(process: "subprocess.Popen[str]") -> dict[str, int]:
    """Process ids of a run's worker ranks, by name."""
    found = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except OSError:
            continue
        if "--parent-pid" in command and command[command.index("--parent-pid") + 1] == str(process.pid):
            found[command[command.index("--name") + 1]] = pid
    return found


def check_lineage(done: Finished, num_prompts: int) -> None:
    """Each draw is trained exactly once in the lineage of the final weights, or listed as dropped."""
    draws = rows(done.folder, "draws.jsonl")
    ends = {row["draw"]: row for row in draws if row["outcome"] in ("trained", "dropped", "filtered")}
    final = [row for row in draws if row["outcome"] != "returned"]
    trained = [row for row in final if row["outcome"] == "trained"]
    assert len(ends) == len(final), "no draw ends twice"
    assert sorted(ends) == list(range(len(ends))), "every draw that was issued is listed"
    assert len({row["prompt"] for row in trained}) == len(trained), "no prompt is trained twice in its epoch"
    dropped = [row for row in final if row["outcome"] == "dropped" and row["reason"] != "run_ended"]
    assert len(trained) + len(dropped) >= num_prompts, f"{len(trained)} trained, {dropped}"
    versions = [row["version"] for row in rows(done.folder, "metrics.jsonl")]
    assert versions == list(range(1, len(versions) + 1))
    assert done.summary["groups_trained"] == len(trained) and done.summary["steps"] == len(versions)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory, models: Path) -> ChaosRunner:
    return ChaosRunner(tmp_path_factory.mktemp("chaos"), models)


@contextmanager
def serving_scripted(models: Path, folder: Path, delta_s: float = 0.02) -> Iterator[ScriptedServer]:
    server = ScriptedServer(models, folder, delta_s)
    try:
        yield server
    finally:
        server.end()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[ScriptedServer]:
    with serving_scripted(models, tmp_path_factory.mktemp("scripted")) as started:
        yield started
