"""Structured concurrency whose errors come out as themselves."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


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
