"""Invariant 1: the ids that the engine sampled are the ids that the trainer scores, whatever their text would give."""

import asyncio
import random
from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from asyppo_async.rpc.calls import ResponseParts
from asyppo_async.trainer.coordinator.generated import Generated
from asyppo_async.trainer.coordinator.rewards import RewardPool
from asyppo_async.trainer.worker.messages import (
    ActorForward,
    ActorForwardResult,
    CriticForward,
    CriticForwardResult,
)
from asyppo_async.types import Prompt, Response, SamplingParams, VersionRuns
from tests.unit.coordinator.test_loop import ScriptedFleet, ScriptedGroup, config_with, rewards, world

__all__ = ["rewards"]

WORDS = ["h", "e", "l", "o", "he", "ll", "llo", "hello"]
IDS = {word: index for index, word in enumerate(WORDS)}
MERGES = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]


class SplittingFleet(ScriptedFleet):
    """Samples "hello" as "he" and "llo", which no tokenizer would write."""

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
        await asyncio.sleep(0.001)
        on_tokens(2 * num_samples)
        response = Response(
            token_ids=np.array([IDS["he"], IDS["llo"]], dtype=np.int32),
            behaviour_logprobs=np.full(2, -0.5, dtype=np.float32),
            versions=VersionRuns(((self.version, 2),)),
            finish_reason="stop",
        )
        return Generated(responses=(response,) * num_samples, server="scripted")


class RecordingGroup(ScriptedGroup):
    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        """Response ids of every forward."""

    async def forward(
        self, request: ActorForward | CriticForward
    ) -> ActorForwardResult | CriticForwardResult:
        self.seen.append(request.sequences.response_token_ids.tolist())
        return await super().forward(request)


@pytest.mark.report("P30")
async def test_ids_when_their_text_has_another_split_reach_the_actor_as_sampled(rewards: RewardPool) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(IDS, MERGES)))
    assert tokenizer.encode(tokenizer.decode([IDS["he"], IDS["llo"]])) == [IDS["hello"]], "an ambiguous split"
    group = RecordingGroup()
    config, fleet = config_with("run.num_steps=2"), SplittingFleet(random.Random(0))
    of_run = world(config, rewards, fleet, decode=tokenizer.decode, group=group)
    await of_run.run(asyncio.Event())
    assert len(of_run.records) == 2 and group.seen
    for ids in group.seen:
        assert ids == [IDS["he"], IDS["llo"]] * (len(ids) // 2)
