"""Deadlines for another process, in which only time counts in which this one itself ran."""

import asyncio
import time

import pytest

from asyppo_async.concurrency import within_own_time


async def test_own_time_when_the_answer_comes_then_it_is_given() -> None:
    assert await within_own_time(asyncio.sleep(0.01, "answer"), 5.0) == "answer"


async def test_own_time_when_it_is_over_then_the_awaitable_is_cancelled() -> None:
    waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        await within_own_time(waiting, 0.2)
    assert waiting.cancelled() and 0.15 < time.monotonic() - began_s < 5


async def test_own_time_when_this_process_was_held_up_then_it_does_not_count() -> None:
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(within_own_time(answer, 0.5))
    await asyncio.sleep(0.05)
    time.sleep(1.0)  # noqa: ASYNC251  the loop itself is held up
    asyncio.get_running_loop().call_later(0.05, answer.set_result, "answer")
    assert await task == "answer"


async def test_own_time_when_cancelled_as_the_awaitable_fails_then_it_is_cancelled() -> None:
    """Who swallows that goes on for ever: a client never left a server that had been killed."""
    failing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(within_own_time(failing, 5.0))
    await asyncio.sleep(0)
    failing.set_exception(OSError("gone"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
