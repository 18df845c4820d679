"""Whether a server lives: a stream of life signs beside its calls, with a deadline of seconds.

The transport's own pings are no judge of that: on a busy host they stay unanswered for tens of seconds while tokens
flow. Here any word of the server counts, a token as much as a life sign, and so does only time in which this process
itself ran: a client that was held up does not take its own silence for the server's.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Protocol, Self

from asyppo_async.concurrency import beside
from asyppo_async.errors import FleetError, FleetUnavailable, RequestRejected
from asyppo_async.rpc.info import ServerInfo

SILENCE_S = 10.0
"""A server that says nothing for so long, while calls wait for it, is given up."""

_log = logging.getLogger(__name__)
_TICKS = 10
_SIGNS = 4
"""Life signs within the time that silence may last."""
_RECONNECT_S = 0.5


class Cancellable(Protocol):
    def cancel(self) -> bool: ...


class UnaryCall(Cancellable, Awaitable[Any], Protocol):
    """One that has a single answer."""


class Guarded:
    """One call that ends when the server falls silent, and with the block `with guarded`."""

    __slots__ = ("call", "guarded", "is_cut")

    def __init__(self, call: Any, guarded: "set[Guarded]") -> None:
        self.call = call
        self.guarded = guarded
        """All of its kind."""
        self.is_cut = False

    def __enter__(self) -> Self:
        self.guarded.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.guarded.discard(self)
        self.call.cancel()  # leaving the loop over a stream does not end the server's side of it


class Pulse:
    """`run` must run beside the calls; it opens nothing before the first of them."""

    def __init__(
        self, address: str, watch: Callable[[float], AsyncGenerator[ServerInfo, None]], silence_s: float
    ) -> None:
        self._address = address
        self._silence_s = silence_s
        self.info: ServerInfo | None = None
        """What the server said of itself last."""
        self._watch = watch
        self._wanted = asyncio.Event()
        self._guarded: set[Guarded] = set()
        self._silent_ticks = 0
        self._is_blind = False

    def heard(self) -> None:
        """The server said something."""
        self._silent_ticks = 0

    def guarding(self, call: Cancellable) -> Guarded:
        """Cancel a call when the server has been silent for too long; `is_cut` tells that from other ends."""
        if not self._guarded:
            self.heard()  # while nobody waited it owed no word
        self._wanted.set()
        return Guarded(call, self._guarded)

    async def answer(self, what: str, call: UnaryCall) -> Any:
        """What a unary call gives.

        Raises:
            FleetUnavailable: the server fell silent before it answered.
        """
        with self.guarding(call) as guarded:
            try:
                return await call
            except asyncio.CancelledError:
                if not guarded.is_cut:
                    raise
                raise self.silence(what) from None

    def silence(self, what: str) -> FleetUnavailable:
        """The error of a call that was cut."""
        failure = FleetUnavailable(
            f"server {self._address}: {what}: no sign of life for {self._silence_s:g} s; is it stopped or cut off?"
        )
        failure.server = self._address
        return failure

    async def run(self) -> None:
        """Consumes: life signs. Produces: ends of guarded calls. Waits for: the first call, then time."""
        await self._wanted.wait()
        async with beside(self._listen()):
            while True:
                await asyncio.sleep(self._silence_s / _TICKS)
                self._silent_ticks += 1
                if self._silent_ticks > _TICKS and not self._is_blind:
                    self._cut()

    def _cut(self) -> None:
        for guarded in self._guarded:
            guarded.is_cut = True
            guarded.call.cancel()

    async def _listen(self) -> None:
        while True:
            try:
                async with aclosing(self._watch(self._silence_s / _SIGNS)) as infos:
                    async for info in infos:
                        self.info = info
                        self.heard()
            except RequestRejected as error:
                # Another kind of server, or a token without that right: the transport's pings are what is left.
                _log.warning("%s; a freeze of this server is noticed late", error)
                self._is_blind = True
                return
            except FleetError:
                await asyncio.sleep(_RECONNECT_S)
