"""The watchdog: every wait can say what it waits for, and none is unbounded."""

import asyncio
import logging
import time

import pytest

from asyppo_async.errors import Stalled
from asyppo_async.trainer.coordinator.waits import LoopLag, Waits, watch


async def test_watch_when_nothing_moves_reports_then_fails_with_the_words_of_each_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logging.getLogger("asyppo_async").propagate = True
    waits = Waits()
    with (
        waits.waiting("loop", "groups 3, 4"),
        waits.waiting("rollouts", "admission"),
        pytest.raises(Stalled) as caught,
        caplog.at_level(logging.WARNING),
    ):
        await asyncio.wait_for(watch(waits, LoopLag(), stall_after_s=0.3, fail_after_s=0.9), 10)
    assert "groups 3, 4" in str(caught.value) and "admission" in str(caught.value)
    assert any("groups 3, 4" in record.message for record in caplog.records), "a warning came first"


async def test_watch_when_there_is_progress_stays_silent() -> None:
    waits = Waits()

    async def move() -> None:
        for _ in range(12):
            await asyncio.sleep(0.1)
            waits.progress()

    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch(waits, LoopLag(), stall_after_s=0.2, fail_after_s=0.6))
        await move()
        assert not watching.done()
        watching.cancel()


async def test_lag_when_the_loop_is_held_is_measured() -> None:
    lag = LoopLag()
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch(Waits(), lag, stall_after_s=60, fail_after_s=60))
        await asyncio.sleep(0.05)
        time.sleep(0.5)  # noqa: ASYNC251  holding the loop is what is measured
        await asyncio.sleep(0.3)
        watching.cancel()
    assert lag.take() > 0.15
    assert lag.take() == 0
