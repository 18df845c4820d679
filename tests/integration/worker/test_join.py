"""`asyppo-train worker`: joining a run by the command that it prints, and being told why not."""

import asyncio
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from asyppo_async.config.critic import CriticSection
from asyppo_async.config.sections import ActorSection
from asyppo_async.errors import WorkerError
from asyppo_async.trainer.worker.group import open_groups, write_token
from asyppo_async.trainer.worker.hub import open_hub
from asyppo_async.trainer.worker.link import EXIT_REFUSED
from asyppo_async.trainer.worker.wire import read_token
from asyppo_async.types import TokenSequences
from tests.integration.worker.conftest import TIMES
from tests.unit.worker.learners import actor_request, critic_request

PROGRAM = [sys.executable, "-m", "asyppo_async.trainer.cli"]


def run_worker(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*PROGRAM, "worker", "--ranks", "1", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


async def test_critics_that_are_started_by_the_printed_command_join_train_and_end_with_the_run(
    tiny_folder: Path, sequences: TokenSequences, tmp_path: Path
) -> None:
    started: list[subprocess.Popen[str]] = []

    def start(line: str) -> None:
        words, command = line.split(": ", 1)
        assert words == "waiting for 2 ranks of role critic"
        arguments = [*shlex.split(command)[1:], "--ranks", "2"]
        started.append(subprocess.Popen([*PROGRAM, *arguments], stderr=subprocess.PIPE, text=True))

    try:
        async with open_groups(
            actor=ActorSection(model=tiny_folder, num_threads=1),
            critic=CriticSection(model=tiny_folder, local_ranks=0, num_threads=1),
            seed=1,
            bucket_bytes=2048,
            folder=tmp_path,
            times=replace(TIMES, join_timeout_s=180),
            on_line=start,
        ) as (actor, critics):
            results = await asyncio.gather(
                actor.train(actor_request(sequences, [9])),
                *[critic.train(critic_request(sequences, [9])) for critic in critics],
            )
            assert len(results) == 3 and not any(result.steps[0].skipped for result in results)
        _, words = await asyncio.to_thread(started[0].communicate, timeout=20)
        assert started[0].returncode == 0, words
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert (tmp_path / "worker.token").stat().st_mode & 0o777 == 0o600


async def test_run_whose_worker_does_not_come_says_role_wanted_and_present(
    tiny_folder: Path, tmp_path: Path
) -> None:
    lines: list[str] = []
    with pytest.raises(
        WorkerError,
        match=r"not all workers joined within 1 s \(run.join_timeout_s\): actor: wanted 2, present 0$",
    ):
        async with open_groups(
            actor=ActorSection(model=tiny_folder, num_ranks=2, local_ranks=0),
            critic=CriticSection(count=0),
            seed=1,
            bucket_bytes=2048,
            folder=tmp_path,
            times=replace(TIMES, join_timeout_s=1),
            on_line=lines.append,
        ):
            pass
    assert lines[0].startswith(
        "waiting for 2 ranks of role actor: asyppo-train worker --role actor --connect 127."
    )


async def test_worker_with_another_token_is_told_so_and_ends(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    own, other = write_token(tmp_path), write_token(tmp_path / "other")
    async with open_hub("tcp://127.0.0.1:*", read_token(own), silent_after_s=8) as hub:
        arguments = ["--role", "critic", "--connect", hub.endpoint, "--token-file", str(other)]
        result = await asyncio.to_thread(run_worker, *arguments)
        assert hub.joins.empty()
    assert result.returncode == EXIT_REFUSED
    assert "the token is not that of the run (see --token-file)" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--connect", "nowhere"], "--connect must be HOST:PORT of the run's coordinator, got nowhere"),
        (
            ["--connect", "127.0.0.1:9"],
            "the token file worker.token cannot be read: No such file or directory",
        ),
    ],
)
def test_worker_whose_options_cannot_be_meant_says_so_in_one_line(arguments: list[str], words: str) -> None:
    result = run_worker("--role", "actor", *arguments)
    assert result.returncode == 1
    assert result.stderr == f"asyppo-train: {words}\n"
