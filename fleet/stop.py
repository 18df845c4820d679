"""What ends a server: a signal, or an operator's call."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Iterator

logger = logging.getLogger(__name__)

_FORCED_EXIT_CODE = 1


class StopSignal:
    """The first SIGTERM or SIGINT, or a drain that was asked for; a second signal ends the process at once."""

    def __init__(self) -> None:
        self.received = asyncio.Event()


@contextlib.contextmanager
def listening_for_signals() -> Iterator[StopSignal]:
    loop = asyncio.get_running_loop()
    stop = StopSignal()

    def on_signal(number: signal.Signals) -> None:
        if stop.received.is_set():
            logger.warning("second signal (%s): ending now", number.name)
            os._exit(_FORCED_EXIT_CODE)
        logger.info("%s: draining; a second signal ends the server at once", number.name)
        stop.received.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
