"""Ranks that a person starts beside a run, here or on another machine: `asyppo-train worker`."""

import os
import subprocess
import sys
from pathlib import Path

from asyppo_async.errors import ConfigError
from asyppo_async.trainer.worker.surroundings import lines_about
from asyppo_async.trainer.worker.wire import read_token


def join_run(
    *,
    role: str,
    connect: str,
    token_file: Path,
    num_ranks: int,
    critic: int | None,
    host: str | None,
    abandoned_after_s: float,
) -> int:
    """One process per rank, until the run ends them; when one fails the others are ended too.

    Returns:
        0 after an orderly end of all, else the exit code of the first that failed.

    Raises:
        ConfigError: the address or the token file cannot be meant.
    """
    address, _, port = connect.removeprefix("tcp://").rpartition(":")
    if not address or not port.isdecimal():
        raise ConfigError(f"--connect must be HOST:PORT of the run's coordinator, got {connect}")
    read_token(token_file)
    command = [sys.executable, "-m", "asyppo_async.trainer.worker.main", "--role", role]
    command += ["--connect", f"tcp://{address}:{port}", "--token-file", str(token_file)]
    command += ["--abandoned-after-s", str(abandoned_after_s), "--parent-pid", str(os.getpid())]
    if critic is not None:
        command += ["--critic", str(critic)]
    if host is not None:
        command += ["--host", host]
    for line in lines_about(address, num_ranks):
        print(f"asyppo-train worker: {line}", file=sys.stderr, flush=True)
    ranks = [subprocess.Popen(command) for _ in range(num_ranks)]
    try:
        return _first_failure(ranks)
    finally:
        for rank in ranks:
            if rank.returncode is None:
                rank.kill()
                rank.wait()


def _first_failure(ranks: list["subprocess.Popen[bytes]"]) -> int:
    for _ in ranks:
        pid, status = os.waitpid(-1, 0)
        code = os.waitstatus_to_exitcode(status)
        next(rank for rank in ranks if rank.pid == pid).returncode = code
        if code != 0:
            return abs(code)
    return 0
