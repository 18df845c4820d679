"""The watchdog: every wait can say what it waits for, and none is unbounded."""

import asyncio
import contextlib
import logging
import random
import re
import time
from collections.abc import Callable

import pytest

from asyppo_async.errors import Stalled
from asyppo_async.trainer.coordinator.generated import Generated
from asyppo_async.trainer.coordinator.rewards import RewardPool
from asyppo_async.trainer.coordinator.waits import LoopLag, Waits, watch
from asyppo_async.types import Prompt
from tests.unit.coordinator.test_loop import ScriptedFleet, config_with, rewards, world

__all__ = ["rewards"]  # the fixture


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


class SilentFleet(ScriptedFleet):
    """Every call is taken by a server that never says a word."""

    async def generate(self, prompt: Prompt, *, on_server: Callable[[str], None], **_: object) -> Generated:
        on_server("10.0.0.7:50051")
        await asyncio.sleep(60)
        raise AssertionError


@pytest.mark.report("P46")
async def test_run_whose_producers_are_all_silent_fails_with_ids_server_and_age(rewards: RewardPool) -> None:
    made = world(config_with(), rewards, SilentFleet(random.Random(0)))
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            tasks.create_task(made.run(asyncio.Event()))
            await watch(made.waits, LoopLag(), stall_after_s=0.3, fail_after_s=1.0)
    (stalled,) = caught.value.exceptions
    assert isinstance(stalled, Stalled)
    words = str(stalled)
    assert re.search(r"group 0: responses to prompt p\d+ from server 10\.0\.0\.7:50051 \(1 s\)", words), words
    assert re.search(r"loop: step 0[^;]* \(1 s\)", words), words


def test_waits_of_very_many_groups_are_told_of_the_oldest() -> None:
    waits = Waits()
    with contextlib.ExitStack() as stack:
        for number in range(500):
            stack.enter_context(waits.waiting(f"group {number}", "responses"))
        words = waits.describe()
        assert words.startswith("group 0: responses") and words.endswith("and 488 more") and len(words) < 500
    assert waits.describe() == "nothing: every loop is busy"
