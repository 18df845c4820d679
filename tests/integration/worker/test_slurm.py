"""`deploy/slurm/asyppo.sbatch` on two nodes that are network namespaces: only `srun` and `scontrol` are stand-ins."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyppo_async.trainer.worker.group import write_token
from asyppo_async.trainer.worker.link import EXIT_REFUSED
from tests.integration.chaos.conftest import SETTINGS, ScriptedServer, num_steps, rows, wait_until
from tests.integration.run.conftest import BIN, ROOT, random_models

NODES = (f"asyppo-{os.getpid()}-a", f"asyppo-{os.getpid()}-b")
HOSTS = ("10.211.7.1", "10.211.7.2")
PORT = 29417
WILDCARDS = ("0.0.0.0", "*", "[::]")

SRUN = """#!/usr/bin/env bash
for argument; do
    case $argument in
    --nodelist=*) node=${argument#*=} ;;
    --*) ;;
    *) break ;;
    esac
    shift
done
exec ip netns exec "$node" "$@"
"""
SCONTROL = """#!/usr/bin/env bash
[ "$1 $2" = "show hostnames" ] || exit 1
tr , '\\n' <<<"$3"
"""


@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    """Two namespaces that reach each other by a cable of their own, and nothing else."""
    if shutil.which("ip") is None or shutil.which("ss") is None:
        pytest.skip("ip and ss (iproute2) are not installed")
    made = subprocess.run(["ip", "netns", "add", NODES[0]], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"network namespaces are not permitted here: {made.stderr.strip()}")
    cable = ["cable0", "netns", NODES[0], "type", "veth", "peer", "name", "cable0", "netns", NODES[1]]
    try:
        ip("netns", "add", NODES[1])
        ip("link", "add", *cable)
        for node, host in zip(NODES, HOSTS, strict=True):
            ip("-n", node, "addr", "add", f"{host}/24", "dev", "cable0")
            ip("-n", node, "link", "set", "cable0", "up")
            ip("-n", node, "link", "set", "lo", "up")
        yield NODES
    finally:
        for node in NODES:
            subprocess.run(["ip", "netns", "del", node], capture_output=True, check=False)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def listening(node: str) -> list[str]:
    """Addresses with ports on which anything in the namespace waits for connections."""
    command = ["ip", "netns", "exec", node, "ss", "-ltnH"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [line.split()[3] for line in lines]


def stand_ins(folder: Path) -> Path:
    folder.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def start_job(folder: Path, models: Path, fleet: str) -> "subprocess.Popen[str]":
    config = folder / "run.toml"
    config.write_text(SETTINGS.format(runs=folder / "runs", models=models))
    environment = os.environ | {
        "PATH": f"{stand_ins(folder / 'bin')}:{BIN}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": ",".join(NODES),
        "ASYPPO_HOST": HOSTS[0],
        "ASYPPO_PORT": str(PORT),
        "ASYPPO_RUNS": str(folder / "runs"),
        "OMP_NUM_THREADS": "1",
        "NCCL_SOCKET_IFNAME": "ib9",
    }
    command = ["bash", str(ROOT / "deploy" / "slurm" / "asyppo.sbatch"), str(config), "--fleet", fleet]
    for setting in ("actor.num_ranks=2", "actor.local_ranks=1", "run.num_steps=2", "run.join_timeout_s=150"):
        command += ["--set", setting]
    with (folder / "job.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, text=True, env=environment)


def start_with_another_token(node: str, folder: Path) -> "subprocess.Popen[str]":
    other = folder / "other"
    other.mkdir()
    program = [sys.executable, "-m", "asyppo_async.trainer.cli", "worker", "--role", "actor", "--ranks", "1"]
    place = ["--connect", f"{HOSTS[0]}:{PORT}", "--token-file", str(write_token(other))]
    command = ["ip", "netns", "exec", node, *program, *place]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.long
@pytest.mark.timeout(420)
def test_job_on_two_nodes_trains_a_group_over_both_and_lets_no_stranger_in(
    nodes: tuple[str, str], tmp_path: Path
) -> None:
    models = random_models(tmp_path / "models")
    run = tmp_path / "runs" / "asyppo-7"
    server = ScriptedServer(models, tmp_path / "server", 0.02, within=("ip", "netns", "exec", nodes[0]))
    started: list[subprocess.Popen[str]] = []
    try:
        job = start_job(tmp_path, models, server.address)
        started.append(job)
        log = tmp_path / "job.log"
        wait_until((run / "worker.token").exists, 120, "the token", alive=lambda: job.poll() is None)
        stranger = start_with_another_token(nodes[1], tmp_path)
        started.append(stranger)
        wait_until(lambda: num_steps(run) >= 1, 240, "step 1", alive=lambda: job.poll() is None)
        addresses = {node: listening(node) for node in nodes}
        words, _ = stranger.communicate(timeout=120)
        assert stranger.returncode == EXIT_REFUSED, words
        assert "the token is not that of the run (see --token-file)" in words
        assert job.wait(timeout=240) == 0, log.read_text()[-3000:]
    finally:
        for process in started:
            process.kill()
            process.wait()
        server.end()

    assert f"{HOSTS[0]}:{PORT}" in addresses[nodes[0]]
    assert any(address.startswith(HOSTS[1]) for address in addresses[nodes[1]]), (
        "gloo, towards the other node"
    )
    open_to_all = [place for places in addresses.values() for place in places if place.startswith(WILDCARDS)]
    assert not open_to_all
    assert len(rows(run, "metrics.jsonl")) == 2
    text = log.read_text()
    assert "actor rank 1 of 2 is ready" in text, "the rank of the second node"
    assert "environment: NCCL_SOCKET_IFNAME=ib9 OMP_NUM_THREADS=1" in text
    assert "warning: NCCL_SOCKET_IFNAME=ib9 names no interface of this machine (" in text
