"""What each loop of the coordinator waits for, and the watchdog that tells it to the user (invariant 7)."""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from asyppo_async.errors import Stalled

_log = logging.getLogger(__name__)

_MOST_LINES = 12
"""Waits that are told in full."""


class Waits:
    """A board on which each loop writes what it waits for. Progress is whatever calls `progress`."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[str, float]] = {}
        self._places: dict[str, str] = {}
        self._last_progress_s = time.monotonic()

    def progress(self) -> None:
        """Something moved: a response, a step, a publication."""
        self._last_progress_s = time.monotonic()

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self._last_progress_s

    @contextmanager
    def waiting(self, loop: str, words: str) -> Iterator[None]:
        """Within the block, `loop` waits for what `words` say."""
        self._waiting[loop] = (words, time.monotonic())
        try:
            yield
        finally:
            self._waiting.pop(loop, None)
            self._places.pop(loop, None)

    def place(self, loop: str, server: str) -> None:
        """Whom `loop` has asked."""
        self._places[loop] = server

    def describe(self) -> str:
        """One line, longest wait first; of very many groups the oldest."""
        now_s = time.monotonic()
        rows = sorted(self._waiting.items(), key=lambda item: item[1][1])
        lines = [
            f"{loop}: {words}{self._place_of(loop)} ({now_s - since_s:.0f} s)"
            for loop, (words, since_s) in rows[:_MOST_LINES]
        ]
        if len(rows) > _MOST_LINES:
            lines.append(f"and {len(rows) - _MOST_LINES} more")
        return "; ".join(lines) if lines else "nothing: every loop is busy"

    def _place_of(self, loop: str) -> str:
        server = self._places.get(loop)
        return f" from server {server}" if server else ""


class LoopLag:
    """Largest delay with which the event loop served a timer since it was last read."""

    def __init__(self) -> None:
        self._largest_s = 0.0

    def note(self, lag_s: float) -> None:
        self._largest_s = max(self._largest_s, lag_s)

    def take(self) -> float:
        largest_s, self._largest_s = self._largest_s, 0.0
        return largest_s


async def watch(waits: Waits, lag: LoopLag, *, stall_after_s: float, fail_after_s: float) -> None:
    """Report a stall, then fail the run.

    Consumes nothing, produces log lines, waits for its timer, unblocked by time alone.

    Raises:
        Stalled: Nothing moved for `fail_after_s`.
    """
    period_s = 0.25
    reported_s = 0.0
    while True:
        before_s = time.monotonic()
        await asyncio.sleep(period_s)
        lag.note(time.monotonic() - before_s - period_s)
        idle_s = waits.idle_s
        if idle_s < stall_after_s:
            reported_s = 0.0
        elif idle_s >= fail_after_s:
            raise Stalled(
                f"no progress for {idle_s:.0f} s (run.fail_after_s = {fail_after_s:g}); waiting for {waits.describe()}"
            )
        elif idle_s - reported_s >= stall_after_s:
            reported_s = idle_s
            _log.warning("no progress for %.0f s; waiting for %s", idle_s, waits.describe())
