"""Structured concurrency whose errors come out as themselves."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")

_TICKS = 10


@asynccontextmanager
async def beside(*loops: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run loops while the body runs, and end them with it. The body's own error comes out, not a group around it."""
    error_of_body: Exception | None = None
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(loop) for loop in loops]
        try:
            yield
        except Exception as error:
            error_of_body = error
        finally:
            for task in running:
                task.cancel()
    if error_of_body is not None:
        raise error_of_body


async def together(*coroutines: Coroutine[None, None, T]) -> list[T]:
    """Results of all, in order; the first error cancels the others and comes out as itself."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
    return [task.result() for task in running]


async def within_own_time(awaitable: Awaitable[T], deadline_s: float) -> T:
    """What another process answers within `deadline_s` in which this one itself ran.

    A process that was held up finds its deadline passed and the answer there, both at once; it is not to take its own
    absence for the other's. So the time is counted in ticks, and a tick that comes late is one tick.

    Raises:
        TimeoutError: the time is over; the awaitable is cancelled.
    """
    loop = asyncio.get_running_loop()
    num_ticks = -1
    timer: asyncio.TimerHandle | None = None

    def tick() -> None:
        nonlocal num_ticks, timer
        num_ticks += 1
        if num_ticks < _TICKS:
            timer = loop.call_later(deadline_s / _TICKS, tick)
        else:
            limit.reschedule(loop.time())

    async with asyncio.timeout(None) as limit:
        tick()
        try:
            return await awaitable
        finally:
            if timer is not None:
                timer.cancel()
    raise AssertionError("a timeout that ends is raised")
