import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
import uvloop

from asyppo_async.errors import TaskError, WorkerError
from asyppo_async.tasks.protocol import TaskSpec
from asyppo_async.trainer.coordinator.rewards import Failed, Late, RewardPool, Scored
from asyppo_async.types import Prompt

POISON = """
import os, sys, time
from asyppo_async.tasks.protocol import TaskSpec
from asyppo_async.tasks.registry import create_task

class Poison:
    name = "poison"

    def __init__(self, spec):
        assert spec.params == {"depth": [1, {"a": None}]}, spec.params
        assert spec.system_prompt == "be good" and spec.seed == 7

    def score(self, prompt, text):
        if text == "loop":
            while True:
                pass
        if text == "power":
            nine = len(prompt.answer)
            return 9 ** (nine ** 9 * 9)
        if text == "raise":
            raise KeyError("no such \\u00fcmlaut")
        if text == "long":
            raise ValueError("x" * 1_000_000)
        if text == "memory":
            self.blocks = [bytearray(2**26) for _ in range(64)]
        if text == "exit":
            os._exit(3)
        if text == "sys.exit":
            sys.exit(4)
        if text == "print":
            print("a task that talks")
            return -0.25
        if text == "heavy":
            create_task(TaskSpec(name="reasoning_gym:chain_sum", seed=0, system_prompt="", params={}))
            loaded = {"torch", "transformers", "vllm", "grpc", "zmq"} & set(sys.modules)
            return 1.0 if not loaded else sorted(loaded)
        if text == "pid":
            with open(os.environ["PID_FILE"], "w") as stream:
                stream.write(str(os.getpid()))
            return 9 ** (len(prompt.answer) ** 9 * 9)
        if text == "length":
            return 1.0 if len(prompt.token_ids) == 100_000 else -1.0
        if text.startswith("sleep"):
            time.sleep(0.5)
            return 0.5
        return {"nan": float("nan"), "inf": float("inf"), "text": "1.0", "none": None, "yes": True, "big": 1.5,
                "int": 1, "good": 1.0}[text]

class Refused:
    def __init__(self, spec):
        raise TaskError("this data set is empty")

from asyppo_async.errors import TaskError
"""


@pytest.fixture(autouse=True)
def poison_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "poison_task.py").write_text(POISON)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


def prompt(num_tokens: int = 3) -> Prompt:
    return Prompt(
        id="p/1", task="poison", text="3+4=", token_ids=tuple(range(num_tokens)), answer="nine char"
    )


def pool(
    *, name: str = "custom:poison_task:Poison", num_children: int = 1, score_s: float = 2.0
) -> RewardPool:
    spec = TaskSpec(name=name, seed=7, system_prompt="be good", params={"depth": [1, {"a": None}]})
    return RewardPool(
        specs=(spec,),
        num_children=num_children,
        score_deadline_s=score_s,
        start_deadline_s=60.0,
        memory_bytes=2**29,
    )


async def test_score_when_the_task_answers_then_is_its_number() -> None:
    async with pool() as rewards:
        assert await rewards.score(prompt(), "good") == Scored(value=1.0)
        assert await rewards.score(prompt(), "int") == Scored(value=1.0)
        assert await rewards.score(prompt(), "print") == Scored(value=-0.25)
        assert await rewards.score(prompt(100_000), "length") == Scored(value=1.0)


@pytest.mark.parametrize("text", ["loop", "power"])
async def test_score_when_the_task_never_ends_then_is_late_and_the_next_one_is_scored(text: str) -> None:
    async with pool(score_s=0.7) as rewards:
        started_s = time.monotonic()
        assert await rewards.score(prompt(), text) == Late(deadline_s=0.7)
        assert time.monotonic() - started_s < 3.0
        assert await rewards.score(prompt(), "good") == Scored(value=1.0)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("memory", "MemoryError: the task needs more than task.reward_memory_gib allows"),
        ("raise", "KeyError: 'no such \u00fcmlaut'"),
        ("nan", "finite number in [-1, 1], got nan"),
        ("inf", "finite number in [-1, 1], got inf"),
        ("big", "finite number in [-1, 1], got 1.5"),
        ("text", "must be a number, got str: '1.0'"),
        ("none", "must be a number, got NoneType"),
        ("yes", "must be a number, got bool"),
        ("exit", "exit code 3"),
        ("sys.exit", "exit code 4"),
        ("unknown", "KeyError: 'unknown'"),
    ],
)
async def test_score_when_the_task_gives_no_reward_then_failed_says_why_and_the_next_one_is_scored(
    text: str, error: str
) -> None:
    async with pool() as rewards:
        outcome = await rewards.score(prompt(), text)
        assert isinstance(outcome, Failed)
        assert error in outcome.error
        assert await rewards.score(prompt(), "good") == Scored(value=1.0)


async def test_score_when_the_tasks_error_is_huge_then_it_is_cut() -> None:
    async with pool() as rewards:
        outcome = await rewards.score(prompt(), "long")
        assert isinstance(outcome, Failed)
        assert len(outcome.error) == 2000


async def test_child_when_asked_then_has_imported_nothing_heavy() -> None:
    async with pool(score_s=60.0) as rewards:
        assert await rewards.score(prompt(), "heavy") == Scored(value=1.0)


async def test_scores_when_one_child_hangs_then_the_other_goes_on() -> None:
    async with pool(num_children=2, score_s=3.0) as rewards, asyncio.TaskGroup() as group:
        hanging = group.create_task(rewards.score(prompt(), "loop"))
        for _ in range(20):
            assert await rewards.score(prompt(), "good") == Scored(value=1.0)
        assert not hanging.done()
    assert hanging.result() == Late(deadline_s=3.0)


async def test_scores_when_more_than_children_then_all_wait_their_turn_in_parallel() -> None:
    async with pool(num_children=2, score_s=20.0) as rewards:
        started_s = time.monotonic()
        outcomes = await asyncio.gather(*(rewards.score(prompt(), f"sleep {index}") for index in range(6)))
        wall_s = time.monotonic() - started_s
    assert outcomes == [Scored(value=0.5)] * 6
    # Three rounds of 0.5 s; one child alone would need 3 s.
    assert 1.5 <= wall_s < 2.9


async def test_score_when_its_caller_is_cancelled_then_the_child_is_replaced() -> None:
    async with pool(score_s=60.0) as rewards:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await rewards.score(prompt(), "loop")
        assert await rewards.score(prompt(), "good") == Scored(value=1.0)


async def test_pool_when_the_task_refuses_then_error_has_its_words() -> None:
    with pytest.raises(TaskError, match="this data set is empty"):
        async with pool(name="custom:poison_task:Refused", num_children=2):
            raise AssertionError("a pool without a task was entered")


@pytest.mark.parametrize("start_deadline_s", [0.0002, 0.001, 0.002, 0.004, 0.008])
async def test_pool_when_a_child_cannot_start_in_time_then_error_names_the_task_and_nothing_stays_open(
    start_deadline_s: float,
) -> None:
    spec = TaskSpec(name="arithmetic", seed=0, system_prompt="", params={})
    hasty = RewardPool(specs=(spec,), num_children=2, score_deadline_s=1.0, start_deadline_s=start_deadline_s)
    with pytest.raises(WorkerError, match=f"task arithmetic was not ready within {start_deadline_s} s"):
        async with hasty:
            raise AssertionError("a pool without a child was entered")
    # What was left open would warn now, and warnings are errors here.
    gc.collect()


def test_pool_when_a_number_is_out_of_range_then_is_refused() -> None:
    with pytest.raises(ValueError, match="got 0 children"):
        pool(num_children=0)


def test_pool_when_the_loop_is_uvloop_then_kills_and_scores_too() -> None:
    async def score() -> None:
        async with pool(score_s=0.7) as rewards:
            assert await rewards.score(prompt(), "power") == Late(deadline_s=0.7)
            assert await rewards.score(prompt(), "good") == Scored(value=1.0)

    run: Callable[[Coroutine[None, None, None]], None] = uvloop.run
    run(score())


PARENT = """
import asyncio
from asyppo_async.tasks.protocol import TaskSpec
from asyppo_async.trainer.coordinator.rewards import RewardPool
from asyppo_async.types import Prompt

async def main():
    params = {"depth": [1, {"a": None}]}
    spec = TaskSpec(name="custom:poison_task:Poison", seed=7, system_prompt="be good", params=params)
    prompt = Prompt(id="p", task="t", text="", token_ids=(), answer="nine char")
    async with RewardPool(specs=(spec,), num_children=1, score_deadline_s=300.0, start_deadline_s=60.0) as pool:
        await pool.score(prompt, "pid")

asyncio.run(main())
"""


def test_child_when_its_parent_is_killed_in_mid_score_then_dies_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    monkeypatch.setenv("PID_FILE", str(pid_file))
    with subprocess.Popen([sys.executable, "-c", PARENT]) as parent:
        try:
            wait_until(lambda: pid_file.is_file() and pid_file.read_text() != "", deadline_s=60.0)
            child_pid = int(pid_file.read_text())
            assert is_alive(child_pid)
        finally:
            parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not is_alive(child_pid), deadline_s=10.0)


def wait_until(condition: Callable[[], bool], *, deadline_s: float) -> None:
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, f"not so within {deadline_s} s"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """A zombie that nobody reaps is dead."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
