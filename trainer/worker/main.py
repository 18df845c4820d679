"""Entry of a worker process: `python -m asyppo_async.trainer.worker.main --role actor --connect tcp://HOST:PORT`."""

import argparse
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import torch

from asyppo_async.errors import AsyppoError, ConfigError, WeightSyncError
from asyppo_async.logs import set_up_logging
from asyppo_async.trainer.worker.control import Hello
from asyppo_async.trainer.worker.model import silence_transformers
from asyppo_async.trainer.worker.serve import serve
from asyppo_async.trainer.worker.surroundings import lines_about
from asyppo_async.trainer.worker.wire import ABANDONED_AFTER_S, read_token
from asyppo_async.weights.store import address_towards

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank, as the child of whoever started it. The exit code is 0 only after an orderly end."""
    options = _parser().parse_args(arguments)
    set_up_logging()
    try:
        if options.parent_pid:
            end_with_parent(options.parent_pid)
        silence_transformers()
        hello = _hello(options)
        if hello.name:  # of others, `asyppo-train worker` has said it for all of its ranks
            for line in lines_about(hello.host, 1):
                logger.info("%s", line)
        serve(
            options.connect,
            read_token(options.token_file),
            hello,
            abandoned_after_s=options.abandoned_after_s,
        )
    except AsyppoError as error:
        logger.error("%s", error)
        return 1
    return 0


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, however it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise ConfigError(f"the process {parent_pid} that started this worker has already ended")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="One rank of a run; `asyppo-train worker` starts them.")
    parser.add_argument("--role", choices=("actor", "critic"), required=True, help="what to be")
    parser.add_argument("--connect", required=True, help="tcp://HOST:PORT of the coordinator")
    parser.add_argument("--token-file", type=Path, required=True, help="file with the run's token")
    parser.add_argument("--critic", type=int, help="which critic to be; default: where one is missing")
    parser.add_argument("--host", help="address under which other ranks reach this machine")
    parser.add_argument(
        "--abandoned-after-s",
        type=float,
        default=ABANDONED_AFTER_S,
        help="end after so many seconds without a word from the coordinator",
    )
    parser.add_argument("--name", default="", help=argparse.SUPPRESS)
    parser.add_argument("--parent-pid", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def _hello(options: argparse.Namespace) -> Hello:
    address = urlsplit(options.connect)
    if address.scheme != "tcp" or not address.hostname or not address.port:
        raise ConfigError(f"--connect must be tcp://HOST:PORT, got {options.connect}")
    try:
        host = options.host or address_towards(address.hostname, address.port)
    except WeightSyncError as error:
        raise ConfigError(f"--connect {options.connect}: there is no way to {address.hostname}") from error
    cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return Hello(
        role=options.role,
        name=options.name,
        host=host,
        pid=os.getpid(),
        devices=tuple(cuda or ["cpu"]),
        critic=options.critic,
    )


if __name__ == "__main__":
    sys.exit(main())
