"""Groups that share devices: one of them computes at a time, and what the one before it held is moved out of the way.

A turn is taken by a request and kept until another group asks for one, so that a group that is asked twice in a row
moves nothing. A wait is bounded by the deadlines of the requests before it.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from asyppo_async.config.placement import Moves
from asyppo_async.trainer.worker.codec import Message
from asyppo_async.trainer.worker.control import MoveToDevice, MoveToHost

logger = logging.getLogger(__name__)

_REMEMBERED = 256


class Member(Protocol):
    """A group, as its neighbours see it."""

    @property
    def label(self) -> str: ...

    async def tell_all(self, request: Message, deadline_s: float) -> None:
        """Have every rank do what has no result."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request on the shared devices, moving included; seconds of the monotonic clock."""

    label: str
    start_s: float
    moved_s: float
    """When the device was this group's."""
    end_s: float


class Turns:
    """Who may compute. One object for all groups of a run."""

    def __init__(self, moves: Moves, deadline_s: float) -> None:
        """`deadline_s`: of moving one group."""
        self._moves = moves
        self._deadline_s = deadline_s
        self._lock = asyncio.Lock()
        self._holder: Member | None = None
        self._away: list[Member] = []
        self._within: ContextVar[Member | None] = ContextVar("within", default=None)
        """Whose turn the running task is in; tasks that it starts are in it too."""
        self.last: deque[Turn] = deque(maxlen=_REMEMBERED)

    @asynccontextmanager
    async def take(self, member: Member) -> AsyncIterator[None]:
        """The body computes on the devices, and nobody else does. Within it the same group may take its turn again.

        Raises:
            WorkerError: the group before it, or this one, could not be moved.
        """
        if self._within.get() is member:
            yield
            return
        async with self._lock:
            start_s = time.monotonic()
            if self._holder is not member:
                await self._change_to(member)
            moved_s = time.monotonic()
            token = self._within.set(member)
            try:
                yield
            finally:
                self._within.reset(token)
                self.last.append(
                    Turn(label=member.label, start_s=start_s, moved_s=moved_s, end_s=time.monotonic())
                )

    async def _change_to(self, member: Member) -> None:
        before, self._holder = self._holder, None
        if before is not None and self._moves != "none":
            await before.tell_all(MoveToHost(weights=self._moves == "all"), self._deadline_s)
            self._away.append(before)
        if member in self._away:
            await member.tell_all(MoveToDevice(), self._deadline_s)
            self._away.remove(member)
        self._holder = member
