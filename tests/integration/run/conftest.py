"""Whole runs through the two programs: tiny random models, one fleet server for the module."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Finished:
    """An `asyppo-train` that has ended."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def summary(self) -> dict[str, object]:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def rows(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


class Runner:
    """Starts `asyppo-train` on the module's tiny models."""

    def __init__(self, folder: Path, models: Path) -> None:
        self.folder = folder
        self.models = models
        self.config = folder / "run.toml"
        self.config.write_text(
            f"""
preset = "asyppo"
[run]
folder = "{folder / "runs"}"
join_timeout_s = 120
stall_after_s = 20
fail_after_s = 100
[actor]
model = "{models / "actor"}"
learning_rate = 1e-4
epochs = 1
num_threads = 1
[critic]
model = "{models / "critic"}"
mini_batches = 1
num_threads = 1
[task]
num_train = 200
num_heldout = 8
[sampling]
max_tokens = 24
[batch]
prompts = 4
group_size = 4
[evaluation]
samples_per_prompt = 2
[fleet]
max_num_seqs = 32
max_model_len = 64
kv_cache_gib = 0.5
num_threads = 1
"""
        )

    def start(self, name: str, *arguments: str, config: Path | None = None) -> subprocess.Popen[str]:
        return self.command(str(config or self.config), "--set", f"run.name={name}", *arguments)

    def command(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [BIN / "asyppo-train", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def finish(self, process: subprocess.Popen[str], name: str, timeout_s: float = 150) -> Finished:
        try:
            out, err = process.communicate(timeout=timeout_s)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        return Finished(process.returncode, out, err, self.folder / "runs" / name)

    def run(self, name: str, *arguments: str, config: Path | None = None) -> Finished:
        return self.finish(self.start(name, *arguments, config=config), name)


@dataclass
class Server:
    """An `asyppo-fleet serve` of its own."""

    process: subprocess.Popen[bytes]
    address: str


def random_models(folder: Path) -> Path:
    """An actor and a critic of random weights, in `folder`."""
    warmup = load_example("tiny_warmup")
    torch.manual_seed(0)
    actor = warmup.new_actor()
    warmup.save(actor, warmup.first_layers(actor, 2), folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Runner:
    return Runner(tmp_path_factory.mktemp("runs"), models)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Server]:
    with serving(models, tmp_path_factory.mktemp("server"), 1) as servers:
        yield servers[0]


@contextmanager
def serving(models: Path, folder: Path, count: int, *, niceness: int = 0) -> Iterator[list[Server]]:
    """Servers of the module's actor, started side by side; nice ones leave the trainer the cores that it asks for."""
    processes = [start_server(models, folder / f"server-{index}", niceness) for index in range(count)]
    try:
        yield [
            wait_until_ready(process, folder / f"server-{index}") for index, process in enumerate(processes)
        ]
    finally:
        running = [process for process in processes if process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process in running:
            try:
                process.wait(60)
            finally:
                process.kill()  # nothing where it has ended
                process.wait()


def start_server(models: Path, folder: Path, niceness: int) -> subprocess.Popen[bytes]:
    folder.mkdir()
    command = ["nice", "-n", str(niceness)]
    command += [BIN / "asyppo-fleet", "serve", "--model", models / "actor", "--port", "0"]
    options = ["--ready-file", folder / "ready.json", "--max-num-seqs", "32", "--max-model-len", "64"]
    options += ["--kv-cache-gib", "0.5", "--num-threads", "1"]
    with (folder / "fleet.log").open("wb") as log:
        return subprocess.Popen([*command, *options], stdout=log, stderr=log)


def wait_until_ready(process: subprocess.Popen[bytes], folder: Path) -> Server:
    deadline_s = time.monotonic() + 220
    ready = folder / "ready.json"
    while not ready.exists():
        assert process.poll() is None, (folder / "fleet.log").read_text()[-2000:]
        assert time.monotonic() < deadline_s, "the server was not ready in 220 s"
        time.sleep(0.2)
    place = json.loads(ready.read_text())
    return Server(process, f"{place['host']}:{place['port']}")
