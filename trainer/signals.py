"""First signal: finish the step and end in order. Second signal: end at once."""

import asyncio
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger(__name__)


@contextmanager
def stop_on_signals(task: "asyncio.Task[object]") -> Iterator[asyncio.Event]:
    """Within the block the event is set by the first SIGINT or SIGTERM; the second cancels `task`."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        name = signal.Signals(number).name
        if stop.is_set():
            _log.warning("%s again: ending at once", name)
            task.cancel()
        else:
            _log.warning("%s: ending after the current step; once more ends at once", name)
            stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield stop
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
