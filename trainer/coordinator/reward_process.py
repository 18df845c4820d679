"""One reward child as the coordinator sees it: started, asked, killed."""

import asyncio
import json
import os
import socket
import sys
from dataclasses import dataclass
from typing import cast

from asyppo_async.errors import WorkerError
from asyppo_async.tasks.protocol import JsonValue
from asyppo_async.trainer.coordinator.reward_child import LENGTH, frame

_CHILD = "asyppo_async.trainer.coordinator.reward_child"
EXIT_DEADLINE_S = 1.0
KILL_DEADLINE_S = 10.0
_MAX_REPLY_BYTES = 1 << 16


@dataclass(slots=True, kw_only=True)
class RewardProcess:
    """A running child. `usable` is lost for good at the first answer that does not come as it should."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    usable: bool = True

    async def ask(self, document: JsonValue) -> dict[str, JsonValue]:
        """
        Raises:
            IncompleteReadError, ConnectionError: the child died.
        """
        self.writer.write(frame(document))
        await self.writer.drain()
        (num_bytes,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
        if num_bytes > _MAX_REPLY_BYTES:
            raise ConnectionError(f"a reply of {num_bytes} bytes was announced")
        return cast(dict[str, JsonValue], json.loads(await self.reader.readexactly(num_bytes)))

    def kill(self) -> None:
        """At once, and without waiting, so that it can be done while being cancelled."""
        self.usable = False
        self.writer.close()
        if self.process.returncode is None:
            self.process.kill()

    async def ended(self) -> int:
        """The exit code of a child that has closed its end, and is killed only if it does not end by itself."""
        self.usable = False
        try:
            async with asyncio.timeout(EXIT_DEADLINE_S):
                return await self.process.wait()
        except TimeoutError:
            self.kill()
            return await self.gone()
        finally:
            self.kill()

    async def gone(self) -> int:
        """The exit code of a killed child.

        Raises:
            WorkerError: the kernel did not end it in time.
        """
        try:
            async with asyncio.timeout(KILL_DEADLINE_S):
                return await self.process.wait()
        except TimeoutError as error:
            raise WorkerError(
                f"reward child {self.process.pid} is there {KILL_DEADLINE_S:.0f} s after SIGKILL; "
                "look for a blocked file system"
            ) from error


async def launch(memory_bytes: int) -> RewardProcess:
    """Start a process that shares one socket with this one and nothing else, and may take so much memory; 0: any.

    It is a fresh interpreter and not a `multiprocessing` child, which would import the run's main module again
    (torch with it) and be sent pickles; and a socket can be awaited without a thread.
    """
    ours, theirs = socket.socketpair()
    try:
        reader, writer = await asyncio.open_unix_connection(sock=ours)
    except BaseException:
        ours.close()
        theirs.close()
        raise
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _CHILD, str(theirs.fileno()), str(os.getpid()), str(memory_bytes)),
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=2,  # what a task prints must not mix with the output of the run
        )
    except BaseException:
        # A child that came to be all the same ends when it finds its socket closed.
        writer.close()
        raise
    finally:
        theirs.close()
    return RewardProcess(process=process, reader=reader, writer=writer)
