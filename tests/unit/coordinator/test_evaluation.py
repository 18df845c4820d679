"""Evaluation on one version: what crosses a publication is made again."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from asyppo_async.config.sections import EvaluationSection
from asyppo_async.rpc.member import Member
from asyppo_async.tasks.protocol import TaskSpec
from asyppo_async.trainer.coordinator.evaluation import Evaluator
from asyppo_async.trainer.coordinator.generated import Generated
from asyppo_async.trainer.coordinator.pinning import Pinning
from asyppo_async.trainer.coordinator.rewards import RewardPool
from asyppo_async.trainer.coordinator.waits import Waits
from asyppo_async.types import Prompt, Response, SamplingParams, VersionRuns

CHARACTERS = "0123456789+=,#"


@pytest.fixture(scope="module")
async def rewards() -> AsyncIterator[RewardPool]:
    spec = TaskSpec(name="arithmetic", seed=0, system_prompt="", params={})
    async with RewardPool(specs=(spec,), num_children=1, score_deadline_s=20, start_deadline_s=60) as pool:
        yield pool


@dataclass
class ScriptedFleet:
    """Answers 1+2+3+4 right in every second response; the first call's responses cross from version 4 to 5."""

    crossing_calls: int = 0
    old_calls: int = 0
    """Calls whose responses are wholly of version 4."""
    calls: list[SamplingParams] = field(default_factory=list)

    async def is_there(self, member: Member) -> bool:
        return True

    async def set_aside(self) -> Member | None:
        return None

    def bring_back(self) -> None: ...

    async def generate_on(self, member: Member, prompt: Prompt, **_: object) -> Generated:
        raise AssertionError("nobody stands aside")

    async def generate(
        self,
        prompt: Prompt,
        *,
        num_samples: int,
        sampling: SamplingParams,
        deadline_s: float,
        on_tokens: Callable[[int], None],
        on_server: Callable[[str], None],
    ) -> Generated:
        self.calls.append(sampling)
        crossing = len(self.calls) <= self.crossing_calls
        responses = []
        for index in range(num_samples):
            text = "1,3,6,10#10" if index % 2 == 0 or sampling.temperature == 0 else "1,3,6,10#11"
            ids = np.array([CHARACTERS.index(character) for character in text], dtype=np.int32)
            newest = 4 if len(self.calls) <= self.old_calls else 5
            versions = VersionRuns.of(
                [4] * 3 + [newest] * (len(ids) - 3) if crossing else [newest] * len(ids)
            )
            logprobs = np.zeros(len(ids), dtype=np.float32)
            responses.append(
                Response(token_ids=ids, behaviour_logprobs=logprobs, versions=versions, finish_reason="stop")
            )
        on_tokens(1)
        return Generated(responses=tuple(responses), server="scripted")


def evaluator(
    fleet: ScriptedFleet,
    rewards: RewardPool,
    num_prompts: int = 0,
    tasks: tuple[str, ...] = ("arithmetic",) * 3,
) -> Evaluator:
    prompts = [
        Prompt(id=f"p{index}", task=tasks[index], text="1+2+3+4=", token_ids=(1, 2), answer="10")
        for index in range(3)
    ]
    return Evaluator(
        prompts=prompts,
        rewards=rewards,
        decode=lambda ids: "".join(CHARACTERS[token] for token in ids),
        sampling=SamplingParams(
            temperature=0.7, top_p=1.0, top_k=0, min_tokens=0, max_tokens=20, stop_token_ids=(0,)
        ),
        settings=EvaluationSection(samples_per_prompt=4, num_prompts=num_prompts),
        deadline_s=20,
        pinning=Pinning(fleet, 1.0),
        waits=Waits(),
    )


async def test_evaluation_reports_accuracy_samples_and_version(rewards: RewardPool) -> None:
    fleet = ScriptedFleet()
    result = await evaluator(fleet, rewards).evaluate()
    assert (result.oldest_version, result.version, result.prompts, result.samples) == (5, 5, 3, 12)
    assert result.accuracy == 0.5 and result.greedy_accuracy == 1.0
    assert result.pass_at == {"1": 0.5, "2": pytest.approx(5 / 6), "4": 1.0}, "2 of 4 right"
    assert result.accuracy_by_task == {}, "one task"
    assert result.accuracy_standard_error == 0 and result.repeated_responses == 0
    assert {sampling.temperature for sampling in fleet.calls} == {0.0, 1.0}
    assert result.accuracy_by_task == {}


async def test_evaluation_of_a_mix_says_the_accuracy_of_each_task(rewards: RewardPool) -> None:
    result = await evaluator(ScriptedFleet(), rewards, tasks=("b", "a", "b")).evaluate()
    assert result.accuracy_by_task == {"a": 0.5, "b": 0.5}


async def test_evaluation_when_a_publication_cuts_responses_makes_them_again(rewards: RewardPool) -> None:
    fleet = ScriptedFleet(crossing_calls=3)
    result = await evaluator(fleet, rewards).evaluate()
    assert result.repeated_responses == 12 and result.samples == 12 and result.version == 5


async def test_evaluation_when_it_outlasts_its_hold_says_which_versions_it_is_of(rewards: RewardPool) -> None:
    fleet = ScriptedFleet(old_calls=2)
    result = await evaluator(fleet, rewards).evaluate()
    assert (result.oldest_version, result.version, result.repeated_responses) == (4, 5, 0)


async def test_evaluation_when_asked_for_fewer_prompts_takes_the_first(rewards: RewardPool) -> None:
    whole = evaluator(ScriptedFleet(), rewards, num_prompts=2)
    assert (await whole.evaluate_beside_training()).prompts == 2
    assert (await whole.evaluate()).prompts == 3
