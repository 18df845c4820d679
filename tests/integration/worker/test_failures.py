"""Real processes that die, hang, are not wanted or are left alone: each ends in one error, in time."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyppo_async.config.critic import CriticSection
from asyppo_async.config.sections import ActorSection
from asyppo_async.errors import ConfigError, WorkerError
from asyppo_async.trainer.worker.clients import ActorGroup
from asyppo_async.trainer.worker.group import open_groups, open_worker_groups, write_token
from asyppo_async.trainer.worker.messages import ActorForward
from asyppo_async.types import TokenSequences
from tests.integration.worker.conftest import TIMES, actor_spec
from tests.unit.worker.learners import actor_request, write_model

WORKER = [sys.executable, "-m", "asyppo_async.trainer.worker.main"]


def process_ids(actor: ActorGroup) -> list[int]:
    return [int(re.search(r"process (\d+)", label)[1]) for label in actor.labels]  # type: ignore[index]


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_killed_rank_is_an_error_in_seconds_that_names_it_and_ends_its_peers(
    tiny_folder: Path, sequences: TokenSequences, tmp_path: Path
) -> None:
    started_s = 0.0
    with pytest.raises(
        WorkerError, match=r"actor rank 1 \(process \d+ on 127.0.0.1\) was killed by .*SIGKILL"
    ):
        async with open_worker_groups(
            [actor_spec(tiny_folder, num_ranks=2)], folder=tmp_path, times=TIMES, bind="tcp://127.0.0.1:*"
        ) as (actor, _):
            first, second = process_ids(actor)
            started_s = time.monotonic()
            os.kill(second, signal.SIGKILL)
            # Rank 0 waits in a collective for a rank that will not come.
            await actor.train(actor_request(sequences, [5, 4]))
    assert time.monotonic() - started_s < 8
    assert not is_running(first) and not is_running(second)


async def test_error_inside_a_rank_arrives_in_its_own_words(
    tiny_folder: Path, sequences: TokenSequences, tmp_path: Path
) -> None:
    beyond = TokenSequences(
        prompt_token_ids=sequences.prompt_token_ids + 1000,
        prompt_lengths=sequences.prompt_lengths,
        response_token_ids=sequences.response_token_ids,
        response_lengths=sequences.response_lengths,
    )
    with pytest.raises(WorkerError, match=r"actor rank 0 .* failed: IndexError: index out of range"):
        async with open_worker_groups(
            [actor_spec(tiny_folder)], folder=tmp_path, times=TIMES, bind="tcp://127.0.0.1:*"
        ) as (actor, _):
            await actor.forward(ActorForward(sequences=beyond, temperature=1.0))
    assert "IndexError" in (tmp_path / "workers" / "actor-0.log").read_text()


@pytest.mark.report("P63")
async def test_critic_with_another_vocabulary_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", vocab_size=31)
    with pytest.raises(
        ConfigError, match=r"critic 0 has another vocabulary than the actor: .*other \(31 tokens"
    ):
        async with open_groups(
            actor=ActorSection(model=tiny_folder, num_threads=1),
            critic=CriticSection(model=other, count=1, num_threads=1),
            seed=0,
            bucket_bytes=1024,
            folder=tmp_path,
            times=TIMES,
        ):
            pass


async def test_worker_that_cannot_load_its_model_says_why(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"actor rank 0 .* failed: ConfigError: .*no config\.json"):
        async with open_worker_groups(
            [actor_spec(tmp_path)], folder=tmp_path, times=TIMES, bind="tcp://127.0.0.1:*"
        ):
            pass


def test_worker_without_a_coordinator_ends_by_itself(tmp_path: Path) -> None:
    command = [*WORKER, "--role", "critic", "--connect", f"tcp://127.0.0.1:{free_port()}"]
    command += ["--token-file", str(write_token(tmp_path)), "--abandoned-after-s", "1.5"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 3
    assert "no word from the coordinator" in result.stderr


def test_local_workers_die_with_a_coordinator_that_is_killed(tiny_folder: Path, tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from tests.integration.worker.conftest import TIMES, actor_spec\n"
        "from asyppo_async.trainer.worker.group import open_worker_groups\n"
        "async def main(model, run):\n"
        "    async with open_worker_groups([actor_spec(model)], folder=run, times=TIMES,\n"
        "                                  bind='tcp://127.0.0.1:*') as (actor, _):\n"
        "        print(*actor.labels, flush=True)\n"
        "        await actor.watch()\n"
        "asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tiny_folder), str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as coordinator:
        assert coordinator.stdout is not None
        label = coordinator.stdout.readline()
        coordinator.kill()
    pid = int(re.search(r"process (\d+)", label)[1])  # type: ignore[index]
    ends_at_s = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < ends_at_s:
        time.sleep(0.05)
    assert not is_running(pid)
