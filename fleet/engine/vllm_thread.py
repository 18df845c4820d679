"""The thread that starts and ends vLLM's processes."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class EngineThread:
    """One thread that lives as long as the engine: the kernel ties a child's life to the thread that started it.

    A daemon, so that a server which is told to end while vLLM starts does not wait for it.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    async def run(self, function: Callable[[], Result]) -> Result:
        job: Future[Result] = Future()
        self._jobs.put((job, function))
        return await asyncio.wrap_future(job)

    def end(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, function = item
            if not job.set_running_or_notify_cancel():
                continue
            try:
                job.set_result(function())
            except Exception as error:
                job.set_exception(error)
            del item, job, function  # they would keep the engine alive beyond its shutdown
