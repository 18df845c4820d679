"""The event loop around the decision core: rollouts, steps, publications, with every policy and schedule.

Real loop, rollouts, core (checked after every transition) and reward process; scripted fleet, groups and publisher.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from asyppo_async.config.load import config_from_tree
from asyppo_async.config.sections import TrainConfig
from asyppo_async.rpc.calls import ResponseParts
from asyppo_async.rpc.codec import SampleTokens
from asyppo_async.tasks.protocol import TaskSpec
from asyppo_async.trainer.coordinator.core import DecisionCore
from asyppo_async.trainer.coordinator.generated import Generated, generated_of
from asyppo_async.trainer.coordinator.loop import TrainingLoop
from asyppo_async.trainer.coordinator.loop_meter import LoopMeter
from asyppo_async.trainer.coordinator.membership import Fleet, RunIdentity
from asyppo_async.trainer.coordinator.pinning import Pinning
from asyppo_async.trainer.coordinator.publication import Publication
from asyppo_async.trainer.coordinator.rewards import RewardPool
from asyppo_async.trainer.coordinator.rollouts import Rollouts, RolloutSettings
from asyppo_async.trainer.coordinator.sampler import EpochSampler
from asyppo_async.trainer.coordinator.step import StepRunner
from asyppo_async.trainer.coordinator.step_record import StepRecord
from asyppo_async.trainer.coordinator.waits import LoopLag, Waits
from asyppo_async.trainer.run_core import decision_settings
from asyppo_async.trainer.worker.messages import (
    ActorForward,
    ActorForwardResult,
    ActorTrain,
    CriticForward,
    CriticForwardResult,
    CriticTrain,
    TrainResult,
)
from asyppo_async.types import Prompt, SamplingParams, VersionRuns
from tests.unit.coordinator.test_step import update

STEPS = 12
SAMPLING = SamplingParams(
    temperature=1.0, top_p=1.0, top_k=0, min_tokens=0, max_tokens=8, stop_token_ids=(0,)
)


@pytest.fixture(scope="module")
async def rewards() -> AsyncIterator[RewardPool]:
    spec = TaskSpec(name="arithmetic", seed=0, system_prompt="", params={})
    async with RewardPool(specs=(spec,), num_children=1, score_deadline_s=20, start_deadline_s=60) as pool:
        yield pool


@dataclass
class ScriptedFleet:
    """Each response takes a random time; its tokens carry the versions that were served while it was made."""

    random: random.Random
    version: int = 0
    stragglers: float = 0.1
    calls: int = 0
    begun_tokens: int = 0
    """Of what there was already when it was asked for."""

    async def generate(
        self,
        prompt: Prompt,
        *,
        num_samples: int,
        sampling: SamplingParams,
        deadline_s: float,
        on_tokens: Callable[[int], None],
        on_server: Callable[[str], None],
        parts: ResponseParts | None = None,
    ) -> Generated:
        on_server("scripted")
        self.calls += 1
        slow = self.random.random() < self.stragglers
        parts = parts or ResponseParts(num_samples, sampling)
        self.begun_tokens += parts.num_tokens
        for position in range(parts.num_tokens // num_samples, 4):
            version = self.version
            await asyncio.sleep(self.random.random() * (0.05 if slow else 0.004))
            for index in range(num_samples):
                parts.add(token(index, position, version))
            on_tokens(parts.num_tokens)
        return generated_of(parts.responses(), "scripted")


def token(sample_index: int, position: int, version: int) -> SampleTokens:
    """Of four, down to the stop token."""
    return SampleTokens(
        sample_index=sample_index,
        token_ids=np.array([3 - position], dtype=np.int32),
        behaviour_logprobs=np.full(1, -0.5, dtype=np.float32),
        versions=VersionRuns(((version, 1),)),
        finish_reason="stop" if position == 3 else None,
    )


class ScriptedGroup:
    """Actor and critic at once: quick, and of no opinion."""

    async def forward(
        self, request: ActorForward | CriticForward
    ) -> ActorForwardResult | CriticForwardResult:
        await asyncio.sleep(0.002)
        numbers = np.random.default_rng(0).normal(-0.5, 0.01, request.sequences.num_response_tokens)
        flat = numbers.astype(np.float32)
        if isinstance(request, ActorForward):
            return ActorForwardResult(logprobs=flat, entropies=flat, compute_s=0.0)
        return CriticForwardResult(values=flat, compute_s=0.0)

    async def train(self, request: ActorTrain | CriticTrain) -> TrainResult:
        await asyncio.sleep(0.005)
        return update()


@dataclass
class ScriptedPublisher:
    fleet: ScriptedFleet
    numbers: list[int] = field(default_factory=list)

    async def publish(self, version: int) -> Publication | None:
        await self.set_version(version)
        return None

    async def set_version(self, version: int) -> None:
        await asyncio.sleep(0.003)
        self.fleet.version = version
        self.numbers.append(version)


@dataclass
class World:
    core: DecisionCore
    loop: TrainingLoop
    rollouts: Rollouts
    publisher: ScriptedPublisher
    records: list[StepRecord]
    waits: Waits

    async def run(self, stop: asyncio.Event) -> None:
        self.core.served(0)
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            rolling = tasks.create_task(self.rollouts.run())
            await self.loop.run(stop)
            rolling.cancel()


def world(
    config: TrainConfig,
    rewards: RewardPool,
    fleet: ScriptedFleet,
    on_step: Callable[[StepRecord], None] = lambda _: None,
    decode: Callable[[Sequence[int]], str] = lambda ids: "3#3" if sum(ids) % 2 else "3#4",
    group: ScriptedGroup | None = None,
) -> World:
    prompts = {
        f"p{index}": Prompt(id=f"p{index}", task="arithmetic", text="1+2=", token_ids=(1, 2), answer="3")
        for index in range(40)
    }
    core = DecisionCore(
        settings=decision_settings(config),
        sampler=EpochSampler(prompt_ids=list(prompts), seed=0, num_epochs=None),
        debug=True,
    )
    changed, waits, records = asyncio.Condition(), Waits(), []
    rollouts = Rollouts(
        core=core,
        prompts=prompts,
        generator=fleet,
        rewards=rewards,
        decode=decode,
        settings=RolloutSettings(group_size=config.batch.group_size, sampling=SAMPLING, group_deadline_s=30),
        changed=changed,
        waits=waits,
    )
    group = group or ScriptedGroup()
    publisher = ScriptedPublisher(fleet)
    loop = TrainingLoop(
        config=config,
        core=core,
        rollouts=rollouts,
        runner=StepRunner(config, group, (group, group)),  # type: ignore[arg-type]
        publisher=publisher,  # type: ignore[arg-type]
        pinning=Pinning(Fleet([], RunIdentity(run_id="run", incarnation=0), debug=True), 1.0),
        before_evaluation=lambda: pytest.fail("no evaluation is due"),
        evaluate=lambda: pytest.fail("no evaluation is due"),
        on_step=lambda record: (records.append(record), on_step(record)),  # type: ignore[func-returns-value]
        changed=changed,
        waits=waits,
        meter=LoopMeter(core, LoopLag()),
    )
    return World(core, loop, rollouts, publisher, records, waits)


def config_with(*overrides: str) -> TrainConfig:
    tree = {"actor": {"model": "a"}, "critic": {"model": "c"}, "batch": {"prompts": 3, "group_size": 2}}
    fixed = [
        "critic.mini_batches=1",
        "actor.mini_batches=1",
        f"run.num_steps={STEPS}",
        "staleness.max_attempts=20",
    ]
    return config_from_tree(tree, [*fixed, *overrides])


@pytest.mark.parametrize("on_stale", ["wait", "mask", "drop"])
@pytest.mark.parametrize(
    ("max_staleness", "schedule"), [(0, "post"), (1, "post"), (1, "critic_ahead"), (3, "pre")]
)
@pytest.mark.parametrize("lead", ["auto", "saturated"])
async def test_loop_reaches_the_last_step_within_the_bound(
    rewards: RewardPool, on_stale: str, max_staleness: int, schedule: str, lead: str
) -> None:
    config = config_with(
        f"staleness.on_stale={on_stale}",
        f"staleness.max_staleness={max_staleness}",
        f"staleness.lead={lead}",
        f"algorithm.schedule={schedule}",
    )
    made = world(config, rewards, ScriptedFleet(random.Random(f"{on_stale}{max_staleness}{schedule}{lead}")))
    await made.run(asyncio.Event())
    assert made.core.version == STEPS and made.publisher.numbers == list(range(1, STEPS + 1))
    for record in made.records:
        batch, weights = record.result.batch, record.result.decisions.policy_weights.numpy()
        assert len(batch.groups) == 3
        with_weight = batch.versions[weights != 0]
        assert (batch.step - with_weight <= max_staleness).all(), "where the gradient is computed"
        if on_stale != "mask":
            assert (batch.step - batch.versions <= max_staleness).all()
    counts = made.core.counts()
    assert counts.trained == 3 * STEPS and counts.dropped == 0
    if on_stale == "wait":
        assert counts.issued == counts.trained, (
            "nothing is thrown away, and nothing is made that no step will take"
        )


async def test_loop_when_stopped_while_it_waits_ends_between_two_steps(rewards: RewardPool) -> None:
    fleet = ScriptedFleet(random.Random(0))
    stop = asyncio.Event()

    def stop_at_third(record: StepRecord) -> None:
        if record.version == 3:
            fleet.stragglers = 1.0
            stop.set()

    made = world(config_with("run.num_steps=10000"), rewards, fleet, on_step=stop_at_third)
    await made.run(stop)
    assert 3 <= made.core.version == len(made.records) < 100
    made.core.check()


async def test_loop_says_what_it_waits_for(rewards: RewardPool) -> None:
    fleet = ScriptedFleet(random.Random(0), stragglers=1.0)
    made = world(config_with(), rewards, fleet)
    said: list[str] = []

    async def listen() -> None:
        while not any("waits for" in words for words in said):
            await asyncio.sleep(0.002)
            said.append(made.waits.describe())

    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        listening = tasks.create_task(listen())
        running = tasks.create_task(made.run(asyncio.Event()))
        await listening
        running.cancel()
    assert any("step 0" in words and "responses to prompt" in words for words in said), said[-3:]


class OneNeverReturns(ScriptedFleet):
    """The last member of every group is still generating at the deadline."""

    def __init__(self) -> None:
        super().__init__(random.Random(0), stragglers=0.0)
        self.places: set[str] = set()
        self.core: DecisionCore | None = None

    async def generate(
        self,
        prompt: Prompt,
        *,
        num_samples: int,
        sampling: SamplingParams,
        deadline_s: float,
        on_tokens: Callable[[int], None],
        on_server: Callable[[str], None],
        parts: ResponseParts | None = None,
    ) -> Generated:
        whole = await super().generate(
            prompt,
            num_samples=num_samples,
            sampling=sampling,
            deadline_s=deadline_s,
            on_tokens=on_tokens,
            on_server=on_server,
        )
        assert self.core is not None
        self.places |= {record.server for record in self.core.live() if record.num_tokens > 0}
        return generated_of([*whole.responses[:-1], None], whole.server)


@pytest.mark.report("P41")
async def test_group_when_a_member_never_returns_is_trained_without_it(rewards: RewardPool) -> None:
    fleet = OneNeverReturns()
    made = world(config_with("batch.group_size=4"), rewards, fleet)
    fleet.core = made.core
    await made.run(asyncio.Event())
    counts, tokens = made.core.counts(), made.core.token_counts()
    assert counts.trained == counts.reduced == 3 * STEPS and counts.dropped == 0
    assert all(
        len(group.trajectories) == 3 for record in made.records for group in record.result.batch.groups
    )
    assert tokens.dropped_by_reason["lost_member"] == 4 * counts.trained
    assert made.rollouts.lost_members == {"deadline": counts.trained}
    assert fleet.places == {"scripted"}, "the ledger says where an attempt is"


@pytest.mark.report("P41")
async def test_group_when_no_member_returns_is_tried_again_and_then_dropped(rewards: RewardPool) -> None:
    class NoneReturns(ScriptedFleet):
        async def generate(self, prompt: Prompt, *, num_samples: int, **_: object) -> Generated:
            return generated_of([None] * num_samples, "scripted")

    config = config_with("staleness.max_attempts=2", "staleness.max_replacements_per_step=6")
    made = world(config, rewards, NoneReturns(random.Random(0)))
    with pytest.raises(ExceptionGroup) as caught:
        await made.run(asyncio.Event())
    assert "deadline" in str(caught.value.exceptions)
    counts = made.core.counts()
    assert counts.dropped_by_reason == {"deadline": counts.dropped} and counts.dropped >= 6
    assert counts.returned_by_reason["deadline"] >= counts.dropped, "each had its second try"


@pytest.mark.report("P34")
async def test_group_when_a_token_is_none_of_the_actors_is_tried_again_as_a_whole(
    rewards: RewardPool,
) -> None:
    """Known where texts are made: the client of a server does not know the vocabulary."""
    num_refused = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal num_refused
        if num_refused < 2:
            num_refused += 1
            raise ValueError("token id 17 is not in the actor's vocabulary of 17")
        return "3#3"

    run = world(config_with("run.num_steps=3"), rewards, ScriptedFleet(random.Random(0)), decode=decode)
    await run.run(asyncio.Event())
    assert run.core.finished and len(run.records) == 3
    group_size = len(run.records[0].result.batch.groups[0].trajectories)
    assert run.rollouts.lost_members == {"garbled": 2 * group_size}
    assert run.core.counts().returned_by_reason == {"garbled": 2}
