"""Evidence that the engine lives: a token, or an answer of its own loop. An open port proves nothing."""

import asyncio
import logging
import time
from collections.abc import Callable

from asyppo_async.fleet.engine.protocol import Engine

_log = logging.getLogger(__name__)
_LOOKS = 4
"""Looks within the time that silence may last."""


class EngineWatch:
    """`heard` is called with every token; `run` asks where none comes."""

    def __init__(self, silence_s: float, on_change: Callable[[], None]) -> None:
        """`silence_s`: after so long without evidence the engine counts as stuck."""
        self.is_stuck = False
        self._silence_s = silence_s
        self._on_change = on_change
        self._heard_s = time.monotonic()

    def heard(self) -> None:
        """The engine made a token."""
        self._heard_s = time.monotonic()
        if self.is_stuck:
            self._set_stuck(False)

    async def run(self, engine: Engine) -> None:
        """Consumes: tokens and answers. Produces: `is_stuck`. Waits for: time and answers. Never returns."""
        while True:
            await asyncio.sleep(self._silence_s / _LOOKS)
            if time.monotonic() - self._heard_s < self._silence_s / _LOOKS:
                continue
            try:
                # What is left of the time since the last evidence: a look that is late is not a second chance.
                left_s = self._silence_s - (time.monotonic() - self._heard_s)
                async with asyncio.timeout(max(left_s, self._silence_s / _LOOKS)):
                    await engine.ask()
            except TimeoutError:
                if time.monotonic() - self._heard_s >= self._silence_s and not self.is_stuck:
                    self._set_stuck(True)
            else:
                self.heard()

    def _set_stuck(self, is_stuck: bool) -> None:
        self.is_stuck = is_stuck
        if is_stuck:
            _log.error("the engine has made no token and answered nothing for %g s", self._silence_s)
        else:
            _log.warning("the engine answers again")
        self._on_change()
