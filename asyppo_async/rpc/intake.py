"""The messages of one call on their way into its parts, decoded several at a time where they come close together.

Between two messages a busy process does a hundred other things, and what decodes the next one has left the core's
caches: one by one, they take up to four times as long. A message that comes alone is decoded at once.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Self

from asyppo_async.rpc.calls import GenerateCall, ResponseParts, check_first
from asyppo_async.rpc.codec import decode_chunk
from asyppo_async.rpc.connection import chunk_of

CLOSE_S = 0.05
"""Messages within this time are decoded together; so much later than they came at most."""
MOST = 16


class Intake:
    """`with Intake(...) as intake`; leaving decodes what has come, also where an error is the reason."""

    def __init__(
        self,
        call: GenerateCall,
        parts: ResponseParts,
        indices: Sequence[int],
        on_tokens: Callable[[int], None],
        on_clipped: Callable[[int], None],
        close_s: float = CLOSE_S,
    ) -> None:
        """Args:
        call: As it was sent.
        parts: Where the chunks go.
        indices: Which sample of `parts` each sample of the call is.
        on_tokens: Called with the tokens of `parts` when some have come.
        on_clipped: Called with the tokens that there is room for, where that is fewer than were asked for.
        close_s: As `CLOSE_S`.
        """
        self._call = call
        self._close_s = close_s
        self._parts = parts
        self._indices = indices
        self._on_tokens = on_tokens
        self._on_clipped = on_clipped
        self._loop = asyncio.get_running_loop()
        self._messages: deque[bytes] = deque()
        self._close_until_s = self._loop.time() + close_s
        self._timer: asyncio.TimerHandle | None = None
        self._error: ValueError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self._decode()
        else:
            with suppress(ValueError):  # what broke off comes out, not what is wrong besides
                self._decode()

    def put(self, message: bytes) -> None:
        """Raise `ValueError` if this message, or one before it, is not what the contract says."""
        self._messages.append(message)
        if self._timer is not None:
            if len(self._messages) >= MOST:
                self._decode()
        elif self._loop.time() >= self._close_until_s:
            self._decode()
        else:
            self._timer = self._loop.call_later(self._close_s, self._decode_late)

    def _decode_late(self) -> None:
        try:
            self._decode()
        except ValueError as error:  # a timer has nobody who would hear it
            self._error = error

    def _decode(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._error is not None:
            raise self._error
        if not self._messages:
            return
        messages, indices, add = self._messages, self._indices, self._parts.add
        has_extras = self._call.has_extras
        while messages:
            # Its bytes are given back here, so that what is made of them finds memory that is in the caches.
            message = chunk_of(messages.popleft())
            if room := check_first(message, self._call):
                self._on_clipped(room)
            for sample in message.samples[:]:  # a list is walked faster than what the message holds
                add(decode_chunk(sample, has_extras=has_extras), indices)
        self._close_until_s = self._loop.time() + self._close_s
        self._on_tokens(self._parts.num_tokens)
