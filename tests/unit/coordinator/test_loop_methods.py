"""The event loop with methods other than the default: without critics, with dynamic sampling, with a choosing sampler.

As in `test_loop`: real loop, rollouts, core (checked after every transition) and reward process; scripted the rest.
"""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from asyppo_async.config.load import config_from_tree
from asyppo_async.tasks.protocol import TaskSpec
from asyppo_async.trainer.coordinator.core import DecisionCore
from asyppo_async.trainer.coordinator.evaluation import PinnedVersion
from asyppo_async.trainer.coordinator.loop import StepRecord, TrainingLoop
from asyppo_async.trainer.coordinator.prompt_table import PromptTable
from asyppo_async.trainer.coordinator.rewards import RewardPool
from asyppo_async.trainer.coordinator.rollouts import Rollouts, RolloutSettings
from asyppo_async.trainer.coordinator.sampler import EpochSampler
from asyppo_async.trainer.coordinator.selection import open_selection
from asyppo_async.trainer.coordinator.step import StepRunner
from asyppo_async.trainer.coordinator.waits import LoopLag, Waits
from asyppo_async.trainer.run import decision_settings
from asyppo_async.types import Prompt
from tests.unit.coordinator.test_loop import SAMPLING, ScriptedFleet, ScriptedGroup, ScriptedPublisher

STEPS = 6


@pytest.fixture(scope="module")
async def rewards() -> AsyncIterator[RewardPool]:
    spec = TaskSpec(name="arithmetic", seed=0, system_prompt="", params={})
    async with RewardPool(spec=spec, num_children=1, score_deadline_s=20, start_deadline_s=60) as pool:
        yield pool


class CoinDecode:
    """Right or wrong by a seeded coin, so that some groups are all equal."""

    def __init__(self) -> None:
        self._random = random.Random(1)

    def __call__(self, token_ids: object) -> str:
        return "3#3" if self._random.random() < 0.5 else "3#4"


@pytest.mark.parametrize(
    ("preset", "prompts"),
    [
        ("grpo", "epochs"),
        ("grpo_x", "greso"),
        ("spo", "spo"),
        ("s3ac", "daps"),
        ("s3ac", "pcl"),
        ("asyppo", "daps"),
    ],
)
async def test_loop_reaches_the_last_step_with_other_methods(
    rewards: RewardPool, preset: str, prompts: str
) -> None:
    grouped = preset != "spo"
    config = config_from_tree(
        {"preset": preset, "actor": {"model": "a"}, "critic": {"model": "c"}},
        [
            "batch.prompts=3",
            f"batch.group_size={2 if grouped else 1}",
            "actor.mini_batches=1",
            "critic.mini_batches=1",
            f"run.num_steps={STEPS}",
            f"selection.prompts={prompts}",
            "selection.uniform_steps=1",
            "selection.ramp_steps=1",
        ],
    )
    ids = [f"p{index}" for index in range(40)]
    table = PromptTable(config.selection)
    selection = open_selection(config, ids, table)
    core = DecisionCore(
        settings=decision_settings(config),
        sampler=selection or EpochSampler(prompt_ids=ids, seed=0, num_epochs=None),
        debug=True,
    )
    fleet = ScriptedFleet(random.Random(preset), overloads=0)
    changed, waits = asyncio.Condition(), Waits()
    rollouts = Rollouts(
        core=core,
        prompts={
            name: Prompt(id=name, task="arithmetic", text="1+2=", token_ids=(1, 2), answer="3")
            for name in ids
        },
        generator=fleet,
        rewards=rewards,
        decode=CoinDecode(),
        settings=RolloutSettings(
            group_size=config.batch.group_size,
            sampling=SAMPLING,
            group_deadline_s=30,
            filter_groups=config.selection.group_filter == "replace",
        ),
        changed=changed,
        waits=waits,
        on_group=lambda group: None if selection is None else selection.record(group),
    )
    critics = tuple(ScriptedGroup() for _ in range(config.critic.count))
    publisher = ScriptedPublisher(fleet)
    records: list[StepRecord] = []
    loop = TrainingLoop(
        config=config,
        core=core,
        rollouts=rollouts,
        runner=StepRunner(config, ScriptedGroup(), critics, table),  # type: ignore[arg-type]
        publisher=publisher,  # type: ignore[arg-type]
        pinned=PinnedVersion(1.0),
        evaluate=lambda _: pytest.fail("no evaluation is due"),
        on_step=records.append,
        on_evaluation=lambda _: None,
        changed=changed,
        waits=waits,
        lag=LoopLag(),
        selection=selection,
    )
    core.served(0)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        rolling = tasks.create_task(rollouts.run())
        await loop.run(asyncio.Event())
        rolling.cancel()
    assert core.version == STEPS and publisher.numbers == list(range(1, STEPS + 1))
    counts = core.counts()
    assert counts.trained == 3 * STEPS and counts.considered == counts.skipped + counts.issued
    for record in records:
        groups = record.result.batch.groups
        if config.selection.group_filter == "replace":
            assert all(len({t.reward for t in group.trajectories}) == 2 for group in groups)
        assert record.metrics["ledger/skipped"] <= counts.skipped
        assert ("selection/probability_mean" in record.metrics) == (prompts == "daps")
    if config.selection.group_filter == "replace":
        assert counts.filtered > 0
