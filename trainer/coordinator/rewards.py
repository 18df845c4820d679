"""Scoring in child processes: a reward function that hangs, raises or dies costs one response, never the run."""

import asyncio
import math
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from asyppo_async.errors import TaskError, WorkerError
from asyppo_async.tasks.protocol import JsonValue, TaskSpec
from asyppo_async.trainer.coordinator.reward_child import score_document, specs_document
from asyppo_async.trainer.coordinator.reward_process import KILL_DEADLINE_S, RewardProcess, launch
from asyppo_async.types import Prompt

ALL_FAILED_AT_FIRST = 12
"""So many failed scores before any good one end the run: the reward itself is broken."""
ALL_FAILED_LATER = 500
"""So many in a row end it later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The task gave a reward."""

    value: float
    """In [-1, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """The task was not done in time, and its process was killed."""

    deadline_s: float

    def __str__(self) -> str:
        return f"no reward within {self.deadline_s:g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The task raised, gave something that is no reward, or ended its process."""

    error: str

    def __str__(self) -> str:
        return f"the reward failed: {self.error}"


RewardOutcome = Scored | Late | Failed


@dataclass(slots=True, kw_only=True)
class _Slot:
    """A place for one child; `child` is None until it is first started."""

    child: RewardProcess | None = None


@dataclass(slots=True, kw_only=True)
class _Streak:
    """Failed scores of one task in a row. A run whose every reward fails would generate for hours for nothing."""

    num_scored: int = 0
    num_failed: int = 0

    def note(self, outcome: RewardOutcome, prompt: Prompt) -> None:
        """
        Raises:
            TaskError: one failure more than a task in order can have in a row.
        """
        if isinstance(outcome, Scored):
            self.num_scored, self.num_failed = self.num_scored + 1, 0
            return
        self.num_failed += 1
        if self.num_failed >= (ALL_FAILED_LATER if self.num_scored else ALL_FAILED_AT_FIRST):
            before = f"after {self.num_scored} good ones" if self.num_scored else "and none was good before"
            raise TaskError(
                f"the last {self.num_failed} rewards of task {prompt.task} failed, {before}; the last one: {outcome}"
            )


@dataclass(kw_only=True)
class RewardPool:
    """`num_children` processes that score with the tasks of `specs`; an async context manager.

    One response at a time is with a child, so a deadline names its culprit. A child that is late, dies, or whose
    caller is cancelled is killed at that moment; the next response that gets its place starts another one first.
    """

    specs: tuple[TaskSpec, ...]
    num_children: int
    score_deadline_s: float
    """Of one score, from the moment a child has the response."""
    start_deadline_s: float
    """Of the start of one child, imports of the task included."""
    memory_bytes: int = 0
    """That one child may take; 0: no bound."""
    _slots: list[_Slot] = field(init=False, default_factory=list)
    _idle: asyncio.Queue[_Slot] = field(init=False, default_factory=asyncio.Queue)
    _num_waiting: int = field(init=False, default=0)
    _streaks: dict[str, "_Streak"] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if (
            not self.specs
            or self.num_children < 1
            or self.score_deadline_s <= 0
            or self.start_deadline_s <= 0
        ):
            raise ValueError(
                f"a reward pool needs a task, a child and deadlines above 0, got {self.num_children} children, "
                f"score_deadline_s {self.score_deadline_s}, start_deadline_s {self.start_deadline_s}"
            )

    @property
    def _names(self) -> str:
        return ", ".join(spec.known_as for spec in self.specs)

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
            TaskError: nothing is scored any more; with the words of the last failure. Or as `WorkerError`.
            WorkerError: a child had to be replaced, and its successor does not start.
        """
        slot = await self._take()
        try:
            if slot.child is None or not slot.child.usable:
                await self._start(slot)
            assert slot.child is not None
            outcome = await self._score_with(slot.child, prompt, text)
        finally:
            self._idle.put_nowait(slot)
        self._streaks.setdefault(prompt.task, _Streak()).note(outcome, prompt)
        return outcome

    async def _take(self) -> _Slot:
        self._num_waiting += 1
        num_rounds = self._num_waiting // self.num_children + 2
        bound_s = num_rounds * (self.score_deadline_s + self.start_deadline_s + KILL_DEADLINE_S)
        try:
            async with asyncio.timeout(bound_s):
                return await self._idle.get()
        except TimeoutError as error:
            raise WorkerError(
                f"no reward child was free within {bound_s:.0f} s, with {self._num_waiting} responses waiting"
            ) from error
        finally:
            self._num_waiting -= 1

    async def _score_with(self, child: RewardProcess, prompt: Prompt, text: str) -> RewardOutcome:
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
        if "spent" in reply:
            child.kill()
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
                slot.child = await launch(self.memory_bytes)
                reply = await slot.child.ask(specs_document(self.specs))
        except TimeoutError as error:
            raise WorkerError(
                f"a reward child of task {self._names} was not ready within {self.start_deadline_s} s"
            ) from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise WorkerError(
                f"a reward child of task {self._names} ended while it started; its own words are on stderr. It "
                "may take task.reward_memory_gib of memory"
            ) from error
        if "error" in reply:
            raise TaskError(str(reply["error"]))

    async def _stop(self) -> None:
        children = [slot.child for slot in self._slots if slot.child is not None]
        for child in children:
            child.kill()
        for child in children:
            await child.gone()


def _outcome(reply: dict[str, JsonValue]) -> RewardOutcome:
    value = reply.get("value")
    if not isinstance(value, float):
        return Failed(error=str(reply.get("error")))
    if not math.isfinite(value) or not -1.0 <= value <= 1.0:
        return Failed(error=f"the task's score must be a finite number in [-1, 1], got {value}")
    return Scored(value=value)
