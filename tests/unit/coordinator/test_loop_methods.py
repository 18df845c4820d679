"""The event loop with methods other than the default: without critics, with dynamic sampling, with a choosing sampler.

As in `test_loop`: real loop, rollouts, core (checked after every transition) and reward process; scripted the rest.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping

import numpy as np
import pytest

from asyppo_async.config.load import config_from_tree
from asyppo_async.config.sections import TrainConfig
from asyppo_async.metrics import Metrics
from asyppo_async.tasks.protocol import TaskSpec
from asyppo_async.trainer.coordinator.choice_protocol import Considered
from asyppo_async.trainer.coordinator.core import DecisionCore
from asyppo_async.trainer.coordinator.loop import TrainingLoop
from asyppo_async.trainer.coordinator.loop_meter import LoopMeter
from asyppo_async.trainer.coordinator.membership import Fleet, RunIdentity
from asyppo_async.trainer.coordinator.pinning import Pinning
from asyppo_async.trainer.coordinator.prompt_table import PromptTable
from asyppo_async.trainer.coordinator.rewards import RewardPool
from asyppo_async.trainer.coordinator.rollouts import Rollouts, RolloutSettings
from asyppo_async.trainer.coordinator.sampler import EpochSampler
from asyppo_async.trainer.coordinator.selection import SelectingSampler, open_selection
from asyppo_async.trainer.coordinator.step import StepRunner
from asyppo_async.trainer.coordinator.step_record import StepRecord
from asyppo_async.trainer.coordinator.waits import LoopLag, Waits
from asyppo_async.trainer.run_core import decision_settings
from asyppo_async.trainer.worker.messages import (
    ActorForward,
    ActorForwardResult,
    CriticForward,
    CriticForwardResult,
)
from asyppo_async.types import FinishReason, Group, Prompt, Response, VersionRuns
from tests.unit.coordinator.test_loop import SAMPLING, ScriptedFleet, ScriptedGroup, ScriptedPublisher

STEPS = 6


@pytest.fixture(scope="module")
async def rewards() -> AsyncIterator[RewardPool]:
    spec = TaskSpec(name="arithmetic", seed=0, system_prompt="", params={})
    async with RewardPool(specs=(spec,), num_children=1, score_deadline_s=20, start_deadline_s=60) as pool:
        yield pool


class CoinDecode:
    """Right or wrong by a seeded coin, so that some groups are all equal."""

    def __init__(self) -> None:
        self._random = random.Random(1)

    def __call__(self, token_ids: object) -> str:
        return "3#3" if self._random.random() < 0.5 else "3#4"


@pytest.mark.parametrize(
    ("reason", "fixed", "reward"),
    [("length", -1.0, -1.0), ("stop", -1.0, 1.0), ("length", None, 1.0), ("stop", None, 1.0)],
)
async def test_response_at_maximum_length_is_wrong_unless_its_text_is_to_be_scored(
    rewards: RewardPool, reason: FinishReason, fixed: float | None, reward: float
) -> None:
    prompt = Prompt(id="p", task="arithmetic", text="1+2=", token_ids=(1, 2), answer="3")
    rollouts = Rollouts(
        core=DecisionCore(
            settings=decision_settings(config_from_tree({"preset": "grpo", "actor": {"model": "a"}})),
            sampler=EpochSampler(prompt_ids=["p"], seed=0, num_epochs=None),
            debug=True,
        ),
        prompts={"p": prompt},
        generator=ScriptedFleet(random.Random(0)),
        rewards=rewards,
        decode=lambda _: "3#3",
        settings=RolloutSettings(group_size=1, sampling=SAMPLING, group_deadline_s=1, truncated_reward=fixed),
        changed=asyncio.Condition(),
        waits=Waits(),
    )
    response = Response(
        token_ids=np.array([3], dtype=np.int32),
        behaviour_logprobs=np.array([-0.5], dtype=np.float32),
        versions=VersionRuns(((0, 1),)),
        finish_reason=reason,
    )
    assert await rollouts._score(prompt, response, "3#3") == reward


IDS = [f"p{index}" for index in range(40)]


def configured(preset: str, *overrides: str, group_size: int = 2) -> TrainConfig:
    return config_from_tree(
        {"preset": preset, "actor": {"model": "a"}, "critic": {"model": "c"}},
        [
            "batch.prompts=3",
            f"batch.group_size={group_size}",
            "actor.mini_batches=1",
            "critic.mini_batches=1",
            f"run.num_steps={STEPS}",
            "selection.uniform_steps=1",
            "selection.ramp_steps=1",
            *overrides,
        ],
    )


async def looped(
    config: TrainConfig,
    rewards: RewardPool,
    selection: SelectingSampler | None,
    table: PromptTable,
    *,
    critics: tuple[ScriptedGroup, ...] | None = None,
    publisher_of: Callable[[ScriptedFleet], ScriptedPublisher] = ScriptedPublisher,
) -> tuple[DecisionCore, list[StepRecord]]:
    """The loop from the first step to the last, fed as `Run` feeds it."""
    core = DecisionCore(
        settings=decision_settings(config),
        sampler=selection or EpochSampler(prompt_ids=IDS, seed=0, num_epochs=None),
        debug=True,
    )
    fleet = ScriptedFleet(random.Random(config.algorithm.estimator))
    changed, waits = asyncio.Condition(), Waits()

    def on_group(group: Group) -> None:
        if selection is not None and config.selection.count_dropped:
            selection.record(group)

    rollouts = Rollouts(
        core=core,
        prompts={
            name: Prompt(id=name, task="arithmetic", text="1+2=", token_ids=(1, 2), answer="3")
            for name in IDS
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
        on_group=on_group,
    )
    if critics is None:
        critics = tuple(ScriptedGroup() for _ in range(config.critic.count))
    publisher = publisher_of(fleet)
    records: list[StepRecord] = []
    loop = TrainingLoop(
        config=config,
        core=core,
        rollouts=rollouts,
        runner=StepRunner(config, ScriptedGroup(), critics, table),  # type: ignore[arg-type]
        publisher=publisher,  # type: ignore[arg-type]
        pinning=Pinning(Fleet([], RunIdentity(run_id="run", incarnation=0), debug=True), 1.0),
        before_evaluation=lambda: pytest.fail("no evaluation is due"),
        evaluate=lambda: pytest.fail("no evaluation is due"),
        on_step=records.append,
        changed=changed,
        waits=waits,
        meter=LoopMeter(core, LoopLag()),
        selection=selection,
    )
    core.served(0)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        rolling = tasks.create_task(rollouts.run())
        await loop.run(asyncio.Event())
        rolling.cancel()
    assert core.version == STEPS and publisher.numbers == list(range(1, STEPS + 1))
    return core, records


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
    config = configured(preset, f"selection.prompts={prompts}", group_size=1 if preset == "spo" else 2)
    table = PromptTable(config.selection)
    core, records = await looped(config, rewards, open_selection(config, IDS, table), table)
    listed = [entry for record in records for entry in record.report.news.considered]
    assert [entry.candidate.number for entry in listed] == list(range(len(listed)))
    assert all((entry.draw_id is None) == (not entry.candidate.accepted) for entry in listed)
    counts = core.counts()
    assert counts.trained == 3 * STEPS and counts.considered == counts.skipped + counts.issued
    for record in records:
        groups = record.result.batch.groups
        if config.selection.group_filter == "replace":
            assert all(len({t.reward for t in group.trajectories}) == 2 for group in groups)
        assert record.metrics["ledger/skipped"] <= counts.skipped
        assert record.metrics["ledger/considered"] - record.metrics["ledger/skipped"] >= 3


class CountingChoice:
    """Takes every candidate and remembers the groups whose outcome it was told."""

    num_scored = 0

    def __init__(self) -> None:
        self.told: list[int] = []

    def consider(self, number: int, prompt_id: str) -> Considered:
        return Considered(accepted=True, acceptance=1.0, success_estimate=None)

    def note_stds(self, stds: Mapping[str, float]) -> None:
        pass

    def record(self, group: Group) -> None:
        self.told.append(group.draw_id)

    def end_step(self, optimizer_steps: int) -> None:
        pass

    def metrics(self) -> Metrics:
        return {}


@pytest.mark.parametrize("counted", [True, False])
async def test_outcomes_of_groups_that_are_not_trained_count_for_the_sampler_unless_told_otherwise(
    rewards: RewardPool, counted: bool
) -> None:
    config = configured("grpo_x", f"selection.count_dropped={str(counted).lower()}")
    choice = CountingChoice()
    selection = SelectingSampler(
        num_prompts=40, choice=choice, draw=lambda number: IDS[number % 40], scores={}
    )
    core, records = await looped(config, rewards, selection, PromptTable(config.selection))
    trained = {group.draw_id for record in records for group in record.result.batch.groups}
    assert core.counts().filtered > 0 and len(choice.told) == len(set(choice.told))
    if counted:
        assert len(choice.told) >= len(trained) + core.counts().filtered and trained < set(choice.told)
    else:
        assert set(choice.told) == trained


class WatchedCritic(ScriptedGroup):
    """Scores candidates once a publication has begun, and lets it end before."""

    def __init__(self, selection: SelectingSampler, published: asyncio.Event) -> None:
        self._selection = selection
        self._published = published
        self.considered_meanwhile: list[int] = []

    async def forward(
        self, request: ActorForward | CriticForward
    ) -> ActorForwardResult | CriticForwardResult:
        if set(request.sequences.response_lengths.tolist()) == {1}:
            await self._published.wait()
            before = self._selection.num_considered
            await asyncio.sleep(0.05)
            self.considered_meanwhile.append(self._selection.num_considered - before)
            self._published.clear()
        return await super().forward(request)


class WatchedPublisher(ScriptedPublisher):
    """Tells when a publication begins."""

    def __init__(self, fleet: ScriptedFleet, published: asyncio.Event) -> None:
        super().__init__(fleet)
        self._published = published

    async def set_version(self, version: int) -> None:
        self._published.set()
        await super().set_version(version)


async def test_candidates_when_a_step_has_ended_then_they_are_scored_beside_its_publication(
    rewards: RewardPool,
) -> None:
    config = configured("s3ac", "staleness.max_staleness=0")
    table, published = PromptTable(config.selection), asyncio.Event()
    selection = open_selection(config, IDS, table)
    assert selection is not None
    critic = WatchedCritic(selection, published)
    _, records = await looped(
        config,
        rewards,
        selection,
        table,
        critics=(critic,),
        publisher_of=lambda fleet: WatchedPublisher(fleet, published),
    )
    assert critic.considered_meanwhile == [0] * STEPS, "nothing is admitted on the new version before"
    for record in records:
        (scoring,) = (span for span in record.trace.spans if span.phase == "critic_scoring")
        (publication,) = (span for span in record.trace.spans if span.phase == "publication")
        assert publication.start_s <= scoring.start_s <= scoring.end_s <= publication.end_s
