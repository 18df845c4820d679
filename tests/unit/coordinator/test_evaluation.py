"""Evaluation on one pinned version: what crosses a publication is made again, and a publication waits its bound."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from asyppo_async.config.sections import EvaluationSection
from asyppo_async.tasks.protocol import TaskSpec
from asyppo_async.trainer.coordinator.evaluation import Evaluator, PinnedVersion
from asyppo_async.trainer.coordinator.rewards import RewardPool
from asyppo_async.trainer.coordinator.rollouts import Generated
from asyppo_async.trainer.coordinator.waits import Waits
from asyppo_async.types import Prompt, Response, SamplingParams

CHARACTERS = "0123456789+=,#"


@pytest.fixture(scope="module")
async def rewards() -> AsyncIterator[RewardPool]:
    spec = TaskSpec(name="arithmetic", seed=0, system_prompt="", params={})
    async with RewardPool(spec=spec, num_children=1, score_deadline_s=20, start_deadline_s=60) as pool:
        yield pool


@dataclass
class ScriptedFleet:
    """Answers 1+2+3+4 right in every second response; the first call's responses cross from version 4 to 5."""

    crossing_calls: int = 0
    old_calls: int = 0
    """Calls whose responses are wholly of version 4."""
    calls: list[SamplingParams] = field(default_factory=list)

    async def generate(
        self,
        prompt: Prompt,
        *,
        num_samples: int,
        sampling: SamplingParams,
        deadline_s: float,
        on_tokens: Callable[[int], None],
    ) -> Generated:
        self.calls.append(sampling)
        crossing = len(self.calls) <= self.crossing_calls
        responses = []
        for index in range(num_samples):
            text = "1,3,6,10#10" if index % 2 == 0 or sampling.temperature == 0 else "1,3,6,10#11"
            ids = np.array([CHARACTERS.index(character) for character in text], dtype=np.int32)
            versions = np.full(len(ids), 4 if len(self.calls) <= self.old_calls else 5, dtype=np.int32)
            versions[: 3 if crossing else 0] = 4
            logprobs = np.zeros(len(ids), dtype=np.float32)
            responses.append(
                Response(token_ids=ids, behaviour_logprobs=logprobs, versions=versions, finish_reason="stop")
            )
        on_tokens(1)
        return Generated(responses=tuple(responses), server="scripted")


def evaluator(fleet: ScriptedFleet, rewards: RewardPool, pinned: PinnedVersion) -> Evaluator:
    prompts = [
        Prompt(id=f"p{index}", task="arithmetic", text="1+2+3+4=", token_ids=(1, 2), answer="10")
        for index in range(3)
    ]
    return Evaluator(
        prompts=prompts,
        generator=fleet,
        rewards=rewards,
        decode=lambda ids: "".join(CHARACTERS[token] for token in ids),
        sampling=SamplingParams(
            temperature=0.7, top_p=1.0, top_k=0, min_tokens=0, max_tokens=20, stop_token_ids=(0,)
        ),
        settings=EvaluationSection(samples_per_prompt=4),
        deadline_s=20,
        pinned=pinned,
        waits=Waits(),
    )


async def test_evaluation_reports_accuracy_samples_and_version(rewards: RewardPool) -> None:
    fleet = ScriptedFleet()
    result = await evaluator(fleet, rewards, PinnedVersion(1.0)).evaluate()
    assert (result.oldest_version, result.version, result.prompts, result.samples) == (5, 5, 3, 12)
    assert result.accuracy == 0.5 and result.greedy_accuracy == 1.0
    assert result.accuracy_standard_error == 0 and result.repeated_responses == 0
    assert {sampling.temperature for sampling in fleet.calls} == {0.0, 1.0}


async def test_evaluation_when_a_publication_cuts_responses_makes_them_again(rewards: RewardPool) -> None:
    fleet = ScriptedFleet(crossing_calls=3)
    result = await evaluator(fleet, rewards, PinnedVersion(1.0)).evaluate()
    assert result.repeated_responses == 12 and result.samples == 12 and result.version == 5


async def test_evaluation_when_it_outlasts_its_hold_says_which_versions_it_is_of(rewards: RewardPool) -> None:
    fleet = ScriptedFleet(old_calls=2)
    result = await evaluator(fleet, rewards, PinnedVersion(1.0)).evaluate()
    assert (result.oldest_version, result.version, result.repeated_responses) == (4, 5, 0)


async def test_evaluation_when_asked_for_fewer_prompts_takes_the_first(rewards: RewardPool) -> None:
    assert (await evaluator(ScriptedFleet(), rewards, PinnedVersion(1.0)).evaluate(2)).prompts == 2


async def test_publication_waits_for_an_evaluation_but_not_longer_than_its_hold() -> None:
    pinned = PinnedVersion(0.1)
    await asyncio.wait_for(pinned.wait(), 5)
    assert pinned.held_s == 0
    async with pinned.hold():
        await asyncio.wait_for(pinned.wait(), 5)
        assert pinned.held_s >= 0.09
        held_s = pinned.held_s
        await asyncio.wait_for(pinned.wait(), 5)
        assert pinned.held_s == held_s, "it had its time"
