"""The verifier and the user's own functions in the children of a run: poison, hangs, and rewards that all fail."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health

from asyppo_async.config.task import DataSection
from asyppo_async.errors import TaskError
from asyppo_async.tasks.protocol import TaskSpec
from asyppo_async.trainer.coordinator.rewards import (
    ALL_FAILED_AT_FIRST,
    Failed,
    Late,
    RewardOutcome,
    RewardPool,
    Scored,
)
from asyppo_async.types import Prompt

POISON = [
    r"\boxed{9^{9^{9}}}",
    r"\boxed{9^{9^{9^{9}}} + 1}",
    r"\boxed{(10^{10})!}",
    r"\boxed{12^{34^{56}}-7}",
]

OWN = """
import time
from asyppo_async.errors import TaskError

def moody(row, response):
    if response == "raise":
        raise KeyError("no such thing")
    if response == "hang":
        time.sleep(1000)
    if response == "talk":
        print("a reward that talks")
        return 0.5
    return {"nan": float("nan"), "text": "1", "none": None, "big": 3, "good": 1, "bad": 0}[response]
"""


def data_spec(label: str = "", **settings: object) -> TaskSpec:
    section = DataSection.model_validate({"path": "rows.jsonl", **settings})
    return TaskSpec(
        name="data", label=label, seed=0, system_prompt="", params=section.model_dump(mode="json")
    )


def prompt(answer: str, task: str = "data") -> Prompt:
    return Prompt(id=f"{task}/1", task=task, text="?", token_ids=(1,), answer=answer)


def pool(*specs: TaskSpec, num_children: int = 1, score_s: float = 1.0) -> RewardPool:
    return RewardPool(specs=specs, num_children=num_children, score_deadline_s=score_s, start_deadline_s=60.0)


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards_of_a_test.py").write_text(OWN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


@pytest.fixture
async def health_stub() -> AsyncIterator[health_pb2_grpc.HealthStub]:
    """A gRPC server in this process, as in the one that holds the children."""
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield health_pb2_grpc.HealthStub(channel)
    await server.stop(None)


@pytest.mark.report("P65")
async def test_verifier_when_it_runs_in_a_child_then_knows_a_right_answer() -> None:
    async with pool(data_spec(), score_s=20.0) as rewards:
        assert await rewards.score(prompt(r"\frac{1}{2}"), r"\boxed{0.5}") == Scored(value=1.0)
        assert await rewards.score(prompt(r"\frac{1}{2}"), r"\boxed{0.6}") == Scored(value=-1.0)
        assert await rewards.score(prompt("x^2-1"), r"\boxed{(x-1)(x+1)}") == Scored(value=1.0)


@pytest.mark.report("P66")
async def test_poison_when_it_comes_in_a_row_then_each_is_late_health_answers_and_the_next_good_one_scores(
    health_stub: health_pb2_grpc.HealthStub,
) -> None:
    async with pool(data_spec(), num_children=1, score_s=1.5) as rewards:
        done = asyncio.Event()
        slowest_s = 0.0

        async def watch_health() -> None:
            nonlocal slowest_s
            while not done.is_set():
                asked_s = time.monotonic()
                await health_stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
                slowest_s = max(slowest_s, time.monotonic() - asked_s)
                await asyncio.sleep(0.02)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch_health())
            for poison in POISON:
                started_s = time.monotonic()
                assert await rewards.score(prompt("7"), poison) == Late(deadline_s=1.5), poison
                # The limit, and the time in which the child that was killed before is replaced.
                assert time.monotonic() - started_s < 1.5 + 10.0
            assert await rewards.score(prompt("7"), r"\boxed{7.0}") == Scored(value=1.0)
            done.set()
        assert slowest_s < 1.0


async def test_garbage_when_it_is_boxed_then_is_wrong_or_late_and_never_right() -> None:
    garbage = ["{" * 2000, "\\frac" * 300, "\x00\ud83d"]
    outcomes: list[RewardOutcome] = []
    async with pool(data_spec(), score_s=2.0) as rewards:
        for text in garbage:
            outcomes.append(await rewards.score(prompt("7"), f"\\boxed{{{text}}}"))
        assert await rewards.score(prompt("7"), r"\boxed{7}") == Scored(value=1.0)
    assert all(outcome in (Scored(value=-1.0), Late(deadline_s=2.0)) for outcome in outcomes), outcomes


@pytest.mark.usefixtures("own_module")
async def test_own_reward_when_it_raises_hangs_or_gives_no_score_then_is_lost_with_its_words() -> None:
    row = prompt(json.dumps({"prompt": "?"}))
    async with pool(data_spec(reward="own_rewards_of_a_test:moody"), score_s=1.0) as rewards:
        assert await rewards.score(row, "good") == Scored(value=1.0)
        assert await rewards.score(row, "talk") == Scored(value=0.0)
        assert await rewards.score(row, "hang") == Late(deadline_s=1.0)
        for text, words in {
            "raise": "KeyError: 'no such thing'",
            "nan": "finite number in 0..1, got float nan",
            "text": "got str '1'",
            "none": "got NoneType None",
            "big": "got int 3",
        }.items():
            outcome = await rewards.score(row, text)
            assert isinstance(outcome, Failed) and words in outcome.error, outcome
        assert await rewards.score(row, "bad") == Scored(value=-1.0)


@pytest.mark.usefixtures("own_module")
async def test_rewards_when_all_fail_from_the_start_then_the_run_ends_with_the_reason() -> None:
    row = prompt(json.dumps({"prompt": "?"}))
    async with pool(data_spec(reward="own_rewards_of_a_test:moody")) as rewards:
        for _ in range(ALL_FAILED_AT_FIRST - 1):
            assert isinstance(await rewards.score(row, "raise"), Failed)
        with pytest.raises(
            TaskError, match=r"the last 12 rewards of task data failed, and none.*no such thing"
        ):
            await rewards.score(row, "raise")
    async with pool(data_spec(reward="own_rewards_of_a_test:moody")) as rewards:
        await rewards.score(row, "good")
        for _ in range(2 * ALL_FAILED_AT_FIRST):
            assert isinstance(await rewards.score(row, "raise"), Failed)


@pytest.mark.usefixtures("own_module")
async def test_several_tasks_when_in_one_pool_then_each_prompt_is_scored_by_its_own() -> None:
    own = data_spec("own", reward="own_rewards_of_a_test:moody")
    async with pool(data_spec("sums"), own) as rewards:
        assert await rewards.score(prompt("7", "sums"), r"\boxed{7}") == Scored(value=1.0)
        assert await rewards.score(prompt("{}", "own"), "bad") == Scored(value=-1.0)


async def test_own_reward_when_its_module_is_missing_then_the_pool_says_so_before_anything_is_scored() -> (
    None
):
    with pytest.raises(
        TaskError, match="reward 'no_such_module_here:f' cannot be loaded: ModuleNotFoundError"
    ):
        async with pool(data_spec(reward="no_such_module_here:f")):
            raise AssertionError("a pool without a reward was entered")


async def test_child_of_a_math_task_when_started_then_has_imported_no_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = "import sys\ndef loaded(row, text):\n    return float(text in sys.modules)\n"
    (tmp_path / "probe_of_a_test.py").write_text(probe)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    specs = (data_spec("sums"), data_spec("probe", reward="probe_of_a_test:loaded"))
    async with pool(*specs, score_s=30) as rewards:
        for module in ("torch", "transformers", "datasets", "pandas", "grpc"):
            assert await rewards.score(prompt("{}", "probe"), module) == Scored(value=-1.0), module
        assert await rewards.score(prompt("{}", "probe"), "math_verify") == Scored(value=1.0)
