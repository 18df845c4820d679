"""Kill and resume around the real loop, core, rollouts and checkpoint files; scripted fleet and groups.

The run is cut off at any moment and built anew from what is on disk, again and again, until it is through.
"""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import CheckpointError
from asyppo_async.trainer.coordinator.checkpoint import CheckpointFolder
from asyppo_async.trainer.coordinator.core import DecisionCore
from asyppo_async.trainer.coordinator.cut import Restored, crc32_of, read_cut
from asyppo_async.trainer.coordinator.draws import News
from asyppo_async.trainer.coordinator.loop import TrainingLoop
from asyppo_async.trainer.coordinator.loop_meter import LoopMeter
from asyppo_async.trainer.coordinator.lost_responses import LostResponses
from asyppo_async.trainer.coordinator.membership import Fleet, RunIdentity
from asyppo_async.trainer.coordinator.pinning import Pinning
from asyppo_async.trainer.coordinator.rewards import RewardPool
from asyppo_async.trainer.coordinator.rollouts import Rollouts, RolloutSettings
from asyppo_async.trainer.coordinator.sampler import EpochSampler
from asyppo_async.trainer.coordinator.saver import Saver
from asyppo_async.trainer.coordinator.step import StepRunner
from asyppo_async.trainer.coordinator.step_record import StepRecord
from asyppo_async.trainer.coordinator.waits import LoopLag, Waits
from asyppo_async.trainer.lineage import abandon_rows
from asyppo_async.trainer.run_core import begun_samples, decision_settings, open_core, queued_groups
from asyppo_async.trainer.run_folder import RunFolder
from asyppo_async.trainer.worker.messages import ActorTrain, CriticTrain, TrainResult
from asyppo_async.types import Prompt
from tests.unit.coordinator.test_loop import (
    SAMPLING,
    ScriptedFleet,
    ScriptedGroup,
    ScriptedPublisher,
    config_with,
    rewards,
)

__all__ = ["rewards"]  # the fixture

PROMPTS = {
    f"p{index}": Prompt(id=f"p{index}", task="arithmetic", text="1+2=", token_ids=(1, 2), answer="3")
    for index in range(24)
}


class CountingGroup(ScriptedGroup):
    """Keeps how often it was trained, as weights would."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_trained = 0
        self.full = False

    async def train(self, request: ActorTrain | CriticTrain) -> TrainResult:
        result = await super().train(request)
        self.num_trained += 1
        return result

    async def save(self, folder: Path) -> None:
        await asyncio.sleep(0.002)
        if self.full:
            raise CheckpointError(f"{self.name}: no space left on device")
        (folder / self.name).mkdir()
        (folder / self.name / "state.json").write_text(json.dumps(self.num_trained))

    def restore(self, folder: Path) -> None:
        self.num_trained = json.loads((folder / self.name / "state.json").read_text())


@dataclass
class Life:
    """One life of a run over `folder`."""

    config: TrainConfig
    pool: RewardPool
    folder: RunFolder
    seed: int
    restored: Restored | None
    groups: list[CountingGroup] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    fleet: ScriptedFleet | None = None

    def __post_init__(self) -> None:
        self.groups = [CountingGroup(name) for name in ("actor", "critic-0", "critic-1")]
        sampler = EpochSampler(prompt_ids=list(PROMPTS), seed=0, num_epochs=1)
        self.core: DecisionCore = open_core(self.config, sampler, self.restored)
        for group in self.groups if self.restored is not None else ():
            group.restore(self.restored.folder)

    def on_step(self, record: StepRecord) -> None:
        self.records.append(record)
        self.folder.append_step({"version": record.version})
        self.on_news(record.report.news)

    def on_news(self, news: News) -> None:
        self.folder.append_news(news, with_candidates=True)

    async def run(self, stop: asyncio.Event) -> None:
        config, restored, core = self.config, self.restored, self.core
        changed, waits = asyncio.Condition(), Waits()
        fleet = self.fleet or ScriptedFleet(random.Random(self.seed), version=core.version)
        rollouts = Rollouts(
            core=core,
            prompts=PROMPTS,
            generator=fleet,
            rewards=self.pool,
            decode=lambda ids: "3#3",
            settings=RolloutSettings(group_size=2, sampling=SAMPLING, group_deadline_s=30),
            changed=changed,
            waits=waits,
            groups=queued_groups(core, restored),
            begun=begun_samples(core, restored),
            lost=LostResponses(config.failures, None if restored is None else restored.state.lost_members),
        )
        actor, *critics = self.groups
        loop = TrainingLoop(
            config=config,
            core=core,
            rollouts=rollouts,
            runner=StepRunner(config, actor, tuple(critics)),  # type: ignore[arg-type]
            publisher=ScriptedPublisher(fleet),  # type: ignore[arg-type]
            pinning=Pinning(Fleet([], RunIdentity(run_id="run", incarnation=0), debug=True), 1.0),
            before_evaluation=lambda: pytest.fail("no evaluation is due"),
            evaluate=lambda: pytest.fail("no evaluation is due"),
            on_step=self.on_step,
            changed=changed,
            waits=waits,
            meter=LoopMeter(core, LoopLag()),
            saver=Saver(
                settings=config.checkpoint,
                folder=CheckpointFolder(self.folder.checkpoints, config.checkpoint.keep),
                groups=self.groups,
                prompts_crc32=crc32_of(PROMPTS),
                tally=lambda: "",
            ),
            on_news=self.on_news,
        )
        core.served(core.version)
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            rolling = tasks.create_task(rollouts.run())
            await loop.run(stop)
            rolling.cancel()


def born(config: TrainConfig, pool: RewardPool, folder: RunFolder, seed: int) -> Life:
    """From what is on disk."""
    saved = CheckpointFolder(folder.checkpoints, config.checkpoint.keep).newest()
    restored = None if saved is None else read_cut(saved.folder, PROMPTS, SAMPLING, time.monotonic())
    abandon_rows(folder.path, None if restored is None else restored.state.core)
    return Life(config, pool, folder, seed, restored)


def rows(folder: RunFolder, name: str) -> list[dict[str, object]]:
    lines = (folder.path / name).read_text().splitlines()
    return [row for row in map(json.loads, lines) if not row.get("abandoned")]


def config_in(folder: Path, *overrides: str) -> TrainConfig:
    fixed = [f"run.folder={folder}", "run.num_steps=8", "run.debug=true", "checkpoint.every_steps=1"]
    return config_with(*fixed, *overrides)


def check_lineage(folder: RunFolder, life: Life) -> None:
    """Invariant 3 over all lives: each draw is trained once, and everything on disk says the same."""
    counts = life.core.counts()
    draws = rows(folder, "draws.jsonl")
    trained = [row for row in draws if row["outcome"] == "trained"]
    assert sorted(row["draw"] for row in trained) == list(range(24)), "each draw once"
    assert sorted(str(row["prompt"]) for row in trained) == sorted(PROMPTS), "each prompt once an epoch"
    assert [row["version"] for row in rows(folder, "metrics.jsonl")] == list(range(1, 9))
    assert [row["number"] for row in rows(folder, "candidates.jsonl")] == list(range(24))
    assert counts.trained == counts.issued == 24 and counts.dropped == 0
    returned = [row for row in draws if row["outcome"] == "returned"]
    assert len(returned) == sum(counts.returned_by_reason.values())
    assert [group.num_trained for group in life.groups] == [8, 8, 8], (
        "what is trained is in the weights, once"
    )


@pytest.mark.report("P52")
@pytest.mark.parametrize(
    ("schedule", "every_steps"),
    [
        ("post", 3),
        ("critic_ahead", 1),
        pytest.param("post", 1, marks=pytest.mark.long),
        pytest.param("critic_ahead", 3, marks=pytest.mark.long),
    ],
)
async def test_run_killed_at_any_moment_again_and_again_trains_each_draw_once(
    rewards: RewardPool, tmp_path: Path, schedule: str, every_steps: int
) -> None:
    chance = random.Random(f"{schedule}{every_steps}")
    config = config_in(
        tmp_path,
        f"algorithm.schedule={schedule}",
        f"checkpoint.every_steps={every_steps}",
        "staleness.max_staleness=2",
    )
    folder = RunFolder.create(config)
    for seed in range(200):
        life = born(config, rewards, folder, seed)
        try:
            # Lives grow longer, so that it ends; many end before their first step, some within a checkpoint.
            async with asyncio.timeout(chance.uniform(0.01, 0.1) * (1 + seed / 3)):
                await life.run(asyncio.Event())
            break
        except TimeoutError:
            continue
    assert seed >= 3, f"only {seed} kills"
    check_lineage(folder, life)


@pytest.mark.report("P52")
async def test_run_when_stopped_goes_on_with_the_tokens_that_had_come(
    rewards: RewardPool, tmp_path: Path
) -> None:
    config = config_in(tmp_path, "checkpoint.every_steps=0", "staleness.max_staleness=2")
    folder = RunFolder.create(config)
    num_begun = num_lives = 0
    for seed in range(50):
        life = born(config, rewards, folder, seed)
        kept = {} if life.restored is None else begun_samples(life.core, life.restored)
        life.fleet = ScriptedFleet(random.Random(seed), version=life.core.version)
        stop = asyncio.Event()
        # Longer from life to life, so that a slow machine comes to the end as well.
        asyncio.get_running_loop().call_later(0.03 + 0.005 * seed, stop.set)
        await life.run(stop)
        in_flight = sum(len(sample.token_ids) for samples in kept.values() for sample in samples)
        assert life.fleet.begun_tokens == in_flight, "what had come is not asked for again"
        num_begun += in_flight
        num_lives += 1
        if life.core.finished:
            break
    assert num_lives > 2 and num_begun > 0
    check_lineage(folder, life)
    assert {record.server for record in life.core.live()} <= {"scripted"}
    draws = rows(folder, "draws.jsonl")
    assert sum(row["tokens"] for row in draws if row["outcome"] == "trained") == 24 * 8


@pytest.mark.parametrize("schedule", ["post", "critic_ahead"])
async def test_run_when_stopped_keeps_what_was_finished_and_goes_on_without_a_step_lost(
    rewards: RewardPool, tmp_path: Path, schedule: str
) -> None:
    config = config_in(
        tmp_path, f"algorithm.schedule={schedule}", "checkpoint.every_steps=0", "staleness.max_staleness=2"
    )
    folder = RunFolder.create(config)
    stop, versions = asyncio.Event(), []
    life = born(config, rewards, folder, 0)
    asyncio.get_running_loop().call_later(0.08, stop.set)
    await life.run(stop)
    num_kept = 0
    while not life.core.finished:
        versions.append(life.core.version)
        life = born(config, rewards, folder, len(versions))
        assert life.core.version == versions[-1]
        num_kept += life.core.counts().queued
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(0.08, stop.set)
        await life.run(stop)
    assert versions and num_kept > 0, "it was stopped in between, with groups that waited for their step"
    check_lineage(folder, life)
    assert not any("abandoned" in line for line in (folder.path / "metrics.jsonl").read_text().splitlines())


async def test_run_when_checkpoints_fail_goes_on_within_the_budget_and_keeps_the_last_good_one(
    rewards: RewardPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_in(tmp_path, "checkpoint.failure_budget=2")
    folder = RunFolder.create(config)
    life = born(config, rewards, folder, 0)

    def fill_disk(record: StepRecord) -> None:
        life.groups[1].full = record.version in (3, 4, 6, 7, 8)

    on_step = life.on_step
    life.on_step = lambda record: (on_step(record), fill_disk(record))  # type: ignore[method-assign,func-returns-value]
    with pytest.raises(ExceptionGroup) as caught:
        await life.run(asyncio.Event())
    assert caught.group_contains(
        CheckpointError, match=r"version 8 failed: critic-0: no space left.*3 in a row"
    )
    assert life.core.version == 8, "training went on meanwhile"
    assert "the checkpoint of version 3 failed" in caplog.text
    saved = CheckpointFolder(folder.checkpoints, 2).newest()
    assert saved is not None and saved.version == 5
    assert not list(folder.checkpoints.glob(".*.partial"))


async def test_run_resumed_with_another_batch_size_gives_its_queue_back(
    rewards: RewardPool, tmp_path: Path
) -> None:
    config = config_in(tmp_path, "staleness.max_staleness=2", "staleness.lead=saturated")
    folder = RunFolder.create(config)
    stop = asyncio.Event()
    life = born(config, rewards, folder, 0)
    asyncio.get_running_loop().call_later(0.1, stop.set)
    await life.run(stop)
    config = config_in(tmp_path, "staleness.max_staleness=2", "batch.prompts=4", "run.overwrite=true")
    restored = born(config, rewards, folder, 1)
    assert decision_settings(config).batch_size == 4 and not queued_groups(restored.core, restored.restored)
    await restored.run(asyncio.Event())
    trained = [row for row in rows(folder, "draws.jsonl") if row["outcome"] == "trained"]
    assert sorted(row["draw"] for row in trained) == list(range(24))
