"""A fleet server on this machine, as a child of the run: started with it, ended with it, dead if the run is killed."""

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import BinaryIO

from asyppo_async.config.sections import TrainConfig
from asyppo_async.config.serve import LORA_RANKS
from asyppo_async.errors import FleetUnavailable

_log = logging.getLogger(__name__)

STOP_GRACE_S = 20.0
"""From SIGTERM to SIGKILL."""
DRAIN_GRACE_S = 2.0
"""What is still generated when a run ends, nobody waits for."""
_NUM_LINES = 8
_TAIL_BYTES = 8192

# The death signal of the parent has to be asked for within the child, and survives exec. Not `preexec_fn`: that runs
# Python between fork and exec, in a process whose gRPC threads are gone.
_TETHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


@asynccontextmanager
async def embedded_fleet(config: TrainConfig, logs: Path) -> AsyncIterator["ChildServer"]:
    """Start `asyppo-fleet serve` for the actor's model on a free port; yields when it is ready.

    Args:
        config: The actor's model and type, the `fleet` section and the time to wait.
        logs: Folder of the log, `fleet.log`.

    Raises:
        FleetUnavailable: the server ended, or was not ready in time; with the last lines of its log.
    """
    fleet = config.fleet
    command = [
        *(sys.executable, "-c", "from asyppo_async.fleet.cli import main; main()", "serve"),
        *("--model", str(config.actor.model)),
        *("--dtype", config.actor.dtype),
        *(("--float32-head",) if config.actor.float32_head else ()),
        *("--port", "0"),
        *("--max-num-seqs", str(fleet.max_num_seqs)),
        *("--max-model-len", str(fleet.max_model_len)),
        *("--kv-cache-gib", str(fleet.kv_cache_gib)),
        *("--num-threads", str(fleet.num_threads)),
        *("--drain-grace-s", str(DRAIN_GRACE_S)),
        *_adapter_options(config),
        *fleet.extra_args,
    ]
    async with child_server(command, logs / "fleet.log", config.run.join_timeout_s) as server:
        yield server


def _adapter_options(config: TrainConfig) -> tuple[str, ...]:
    if config.weights.lora != "adapter":
        return ()
    room = next(rank for rank in LORA_RANKS if rank >= config.actor.lora_rank)
    return "--enable-lora", "--max-lora-rank", str(room)


class ChildServer:
    """A server that is this process's child."""

    def __init__(self, address: str, process: asyncio.subprocess.Process) -> None:
        self.address = address
        """host:port"""
        self._process = process

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None


@asynccontextmanager
async def child_server(
    command: Sequence[str], log: Path, ready_timeout_s: float
) -> AsyncIterator[ChildServer]:
    """Run a command that takes `--ready-file`, until the block is left; yields when it reports its address."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        start_bytes = output.tell()
        async with _running(command, output) as (process, ready):
            _log.info("embedded fleet server: pid=%d, log %s", process.pid, log)
            address = await _address(process, ready, log, start_bytes, ready_timeout_s)
            _log.info("embedded fleet server is ready at %s", address)
            try:
                yield ChildServer(address, process)
            finally:
                if process.returncode is not None:
                    _log.error(
                        "the embedded fleet server ended by itself (%s): %s",
                        _ending(process.returncode),
                        _last_lines(log, start_bytes),
                    )


@asynccontextmanager
async def _running(
    command: Sequence[str], output: BinaryIO
) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.StreamReader]]:
    """The child, and what it writes to its ready file: a pipe, so that its end is seen as well as its being ready."""
    with _pipe() as (reading, writing):
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(reading), "rb")
        )
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-ISc", _TETHER, str(os.getpid())),
            *command,
            *("--ready-file", f"/dev/fd/{writing}"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=(writing,),
            # Ctrl-C is the run's to handle: it ends the server itself, in order.
            start_new_session=True,
        )
    try:
        yield process, reader
    finally:
        transport.close()
        await _end(process)


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    try:
        yield reading, writing
    finally:
        os.close(reading)
        os.close(writing)


async def _address(
    process: asyncio.subprocess.Process,
    ready: asyncio.StreamReader,
    log: Path,
    start_bytes: int,
    ready_timeout_s: float,
) -> str:
    started_s = time.monotonic()
    try:
        async with asyncio.timeout(ready_timeout_s):
            line = await ready.readline()
            if not line:
                code = await process.wait()
    except TimeoutError:
        raise FleetUnavailable(
            f"the embedded fleet server was not ready within {ready_timeout_s:g} s; the end of {log}: "
            f"{_last_lines(log, start_bytes)}"
        ) from None
    if not line:
        raise FleetUnavailable(
            f"the embedded fleet server ended ({_ending(code)}) after {time.monotonic() - started_s:.1f} s, before "
            f"it was ready; the end of {log}: {_last_lines(log, start_bytes)}"
        )
    where = json.loads(line)
    return f"{where['host']}:{where['port']}"


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_GRACE_S):
            await process.wait()
    except TimeoutError:
        _log.warning("the embedded fleet server did not end within %g s of SIGTERM: killed", STOP_GRACE_S)
        process.kill()
        await process.wait()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _last_lines(log: Path, start_bytes: int) -> str:
    """What this child wrote last, in one line."""
    with log.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(start_bytes, size - _TAIL_BYTES))
        text = stream.read().decode("utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-_NUM_LINES:]) or "nothing was written"
