"""Scoring in child processes: a reward function that hangs, raises or dies costs one response, never the run."""

import asyncio
import json
import math
import os
import socket
import sys
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, cast

from asyppo_async.errors import TaskError, WorkerError
from asyppo_async.tasks.protocol import JsonValue, TaskSpec
from asyppo_async.trainer.coordinator.reward_child import LENGTH, frame, score_document, spec_document
from asyppo_async.types import Prompt

_CHILD = "asyppo_async.trainer.coordinator.reward_child"
_EXIT_DEADLINE_S = 1.0
_KILL_DEADLINE_S = 10.0
_MAX_REPLY_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The task gave a reward."""

    value: float
    """In [-1, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """The task was not done in time, and its process was killed."""

    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The task raised, gave something that is no reward, or ended its process."""

    error: str


RewardOutcome = Scored | Late | Failed


@dataclass(slots=True, kw_only=True)
class _Child:
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
            async with asyncio.timeout(_EXIT_DEADLINE_S):
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
            async with asyncio.timeout(_KILL_DEADLINE_S):
                return await self.process.wait()
        except TimeoutError as error:
            raise WorkerError(
                f"reward child {self.process.pid} is there {_KILL_DEADLINE_S:.0f} s after SIGKILL; "
                "look for a blocked file system"
            ) from error


@dataclass(slots=True, kw_only=True)
class _Slot:
    """A place for one child; `child` is None until it is first started."""

    child: _Child | None = None


@dataclass(kw_only=True)
class RewardPool:
    """`num_children` processes that score with the task of `spec`; an async context manager.

    One response at a time is with a child, so a deadline names its culprit. A child that is late, dies, or whose
    caller is cancelled is killed at that moment; the next response that gets its place starts another one first.
    """

    spec: TaskSpec
    num_children: int
    score_deadline_s: float
    """Of one score, from the moment a child has the response."""
    start_deadline_s: float
    """Of the start of one child, imports of the task included."""
    _slots: list[_Slot] = field(init=False, default_factory=list)
    _idle: asyncio.Queue[_Slot] = field(init=False, default_factory=asyncio.Queue)
    _num_waiting: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.num_children < 1 or self.score_deadline_s <= 0 or self.start_deadline_s <= 0:
            raise ValueError(
                f"a reward pool needs a child and deadlines above 0, got {self.num_children} children, "
                f"score_deadline_s {self.score_deadline_s}, start_deadline_s {self.start_deadline_s}"
            )

    async def __aenter__(self) -> Self:
        """
        Raises:
            TaskError: the child cannot build the task; in its words.
            WorkerError: a child did not start in time.
        """
        self._slots = [_Slot() for _ in range(self.num_children)]
        try:
            # All at once: each takes most of a second of imports.
            results = await asyncio.gather(*map(self._start, self._slots), return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
        except BaseException:
            await self._stop()
            raise
        for slot in self._slots:
            self._idle.put_nowait(slot)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def score(self, prompt: Prompt, text: str) -> RewardOutcome:
        """The task's reward for a response, or why there is none.

        Waits for a free child, at most as long as those before it can take.

        Raises:
            TaskError, WorkerError: a child had to be replaced, and its successor does not start.
        """
        slot = await self._take()
        try:
            if slot.child is None or not slot.child.usable:
                await self._start(slot)
            assert slot.child is not None
            return await self._score_with(slot.child, prompt, text)
        finally:
            self._idle.put_nowait(slot)

    async def _take(self) -> _Slot:
        self._num_waiting += 1
        num_rounds = self._num_waiting // self.num_children + 2
        bound_s = num_rounds * (self.score_deadline_s + self.start_deadline_s + _KILL_DEADLINE_S)
        try:
            async with asyncio.timeout(bound_s):
                return await self._idle.get()
        except TimeoutError as error:
            raise WorkerError(
                f"no reward child was free within {bound_s:.0f} s, with {self._num_waiting} responses waiting"
            ) from error
        finally:
            self._num_waiting -= 1

    async def _score_with(self, child: _Child, prompt: Prompt, text: str) -> RewardOutcome:
        try:
            async with asyncio.timeout(self.score_deadline_s):
                reply = await child.ask(score_document(prompt, text))
        except TimeoutError:
            child.kill()
            return Late(deadline_s=self.score_deadline_s)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            return Failed(error=f"the reward child ended with exit code {await child.ended()}: {error}")
        except BaseException:
            # Cancelled: the child is busy with a response that nobody waits for.
            child.kill()
            raise
        return _outcome(reply)

    async def _start(self, slot: _Slot) -> None:
        """Put a ready child into a slot, whose former child, if any, is killed.

        Raises:
            TaskError: the child cannot build the task.
            WorkerError: it died, or was not ready in time.
        """
        if slot.child is not None:
            slot.child.kill()
            await slot.child.gone()
        try:
            async with asyncio.timeout(self.start_deadline_s):
                slot.child = await _launch()
                reply = await slot.child.ask(spec_document(self.spec))
        except TimeoutError as error:
            raise WorkerError(
                f"a reward child of task {self.spec.name} was not ready within {self.start_deadline_s} s"
            ) from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise WorkerError(
                f"a reward child of task {self.spec.name} ended while it started; its own words are on stderr"
            ) from error
        if "error" in reply:
            raise TaskError(str(reply["error"]))

    async def _stop(self) -> None:
        children = [slot.child for slot in self._slots if slot.child is not None]
        for child in children:
            child.kill()
        for child in children:
            await child.gone()


async def _launch() -> _Child:
    """Start a process that shares one socket with this one and nothing else.

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
            *(sys.executable, "-m", _CHILD, str(theirs.fileno()), str(os.getpid())),
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
    return _Child(process=process, reader=reader, writer=writer)


def _outcome(reply: dict[str, JsonValue]) -> RewardOutcome:
    value = reply.get("value")
    if not isinstance(value, float):
        return Failed(error=str(reply.get("error")))
    if not math.isfinite(value) or not -1.0 <= value <= 1.0:
        return Failed(error=f"the task's score must be a finite number in [-1, 1], got {value}")
    return Scored(value=value)
