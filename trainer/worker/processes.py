"""The ranks that run on the coordinator's own machine: child processes that end with it, one log file each."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from asyppo_async.trainer.worker.control import WorkerRole

_LAST_LINES = 12
_LAST_BYTES = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommand:
    """How to start one local rank."""

    name: str
    """Of the process and its log file."""
    role: WorkerRole
    critic: int | None
    num_threads: int
    """0: all."""


class WorkerProcess:
    """A started rank."""

    def __init__(self, command: WorkerCommand, process: asyncio.subprocess.Process, log: Path) -> None:
        self.command = command
        self.log = log
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> str:
        """Wait for its end; how it ended, with the last lines of its log."""
        code = await self._process.wait()
        how = f"was killed by signal {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return f"{how}; {await asyncio.to_thread(self._last_lines)}"

    async def end(self, grace_s: float) -> None:
        """Let it end by itself for `grace_s`, then kill it."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), grace_s)
            return
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    def _last_lines(self) -> str:
        with self.log.open("rb") as stream:
            stream.seek(max(0, self.log.stat().st_size - _LAST_BYTES))
            lines = stream.read().decode(errors="replace").strip().splitlines()[-_LAST_LINES:]
        return f"the end of {self.log}:\n" + "\n".join(lines) if lines else f"{self.log} is empty"


@asynccontextmanager
async def started_workers(
    commands: Sequence[WorkerCommand], *, endpoint: str, token_file: Path, log_folder: Path, grace_s: float
) -> AsyncIterator[tuple[WorkerProcess, ...]]:
    """Start local ranks; at the end of the body they get `grace_s` to end by themselves."""
    workers: list[WorkerProcess] = []
    try:
        for command in commands:
            workers.append(await _start(command, endpoint, token_file, log_folder))
        yield tuple(workers)
    finally:
        async with asyncio.TaskGroup() as tasks:
            for worker in workers:
                tasks.create_task(worker.end(grace_s))


async def _start(command: WorkerCommand, endpoint: str, token_file: Path, log_folder: Path) -> WorkerProcess:
    log = log_folder / f"{command.name}.log"
    arguments = ["--role", command.role, "--connect", endpoint, "--token-file", str(token_file)]
    arguments += ["--name", command.name, "--parent-pid", str(os.getpid())]
    if command.critic is not None:
        arguments += ["--critic", str(command.critic)]
    with _open_log(log) as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "asyppo_async.trainer.worker.main",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment_of_rank(command.num_threads),
            # A terminal's Ctrl-C goes to the coordinator, which ends its workers in order.
            start_new_session=True,
        )
    return WorkerProcess(command, process, log)


def environment_of_rank(num_threads: int = 0) -> dict[str, str]:
    """The environment of a rank's process; what OpenMP reads has to be there before torch is imported.

    By default OpenMP's threads spin while they wait for each other. Where more threads than cores want to run (an
    engine, an actor and critics on one machine) the spinning keeps the awaited thread from its core: a training step
    took 37 to 65 s instead of 1 to 3. So they sleep, unless the user has said otherwise.
    """
    environment = dict(os.environ)
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if num_threads:
        environment["OMP_NUM_THREADS"] = str(num_threads)
    return environment


def _open_log(log: Path) -> BinaryIO:
    return log.open("ab")
