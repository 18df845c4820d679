"""Every preset trains a tiny model: the real step and worker code around an in-process sampler."""

import math

import numpy as np
import pytest
import torch

from asyppo_async.config.load import preset_names
from asyppo_async.trainer.worker.model import Policy
from asyppo_async.types import SamplingParams
from benchmarks.trends.sampler import TinySampler
from tests.unit.composition.tiny import EOS, MAX_TOKENS, PROMPTS, open_run, reward, shrunk

SET_UPS = {"asyppo_4b", "asyppo_14b", "vcppo_32b", "s3ac_1.5b_group", "s3ac_1.5b_single", "s3ac_moe"}
NUM_STEPS = 15
LAG = 1
"""Responses come from the version before, so that ratios are not all 1."""
NUM_SAMPLES = 12
"""Of each of 40 prompts: a standard error of 0.046 in the mean reward of an untrained policy."""
LEAST_GAIN = 0.14
"""Of mean reward in [-1, 1]: three of those."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def mean_reward(policy: Policy, *, truncated_is_wrong: bool) -> float:
    sampling = SamplingParams(
        temperature=1.0, top_p=1.0, top_k=0, min_tokens=0, max_tokens=MAX_TOKENS, stop_token_ids=(EOS,)
    )
    sampler = TinySampler(policy, sampling, torch.Generator().manual_seed(1))
    groups = sampler.sample(PROMPTS, num_samples=NUM_SAMPLES, version=0)
    rewards = [
        -1.0
        if truncated_is_wrong and response.finish_reason == "length"
        else reward(prompt, response.token_ids.tolist())
        for prompt, responses in zip(PROMPTS, groups, strict=True)
        for response in responses
    ]
    return float(np.mean(rewards))


def presets() -> list[object]:
    """Methods in the short tests; the papers' own set-ups, which are these methods at other sizes, in the long ones."""
    return [
        pytest.param(name, marks=pytest.mark.long) if name in SET_UPS else name for name in preset_names()
    ]


@pytest.mark.parametrize("preset", presets())
async def test_preset_trains_a_tiny_model_that_gets_better(preset: str) -> None:
    config = shrunk(preset)
    run, policy, critics = open_run(config, lag=LAG)
    finished = config.algorithm.truncated == "finished"
    before = mean_reward(policy, truncated_is_wrong=finished)
    critic_weights = [
        [weight.detach().clone() for weight in critic.module.parameters()] for critic in critics
    ]
    for _ in range(NUM_STEPS):
        result, metrics = await run.train()
        planned = config.actor.epochs * config.actor.mini_batches
        assert result.actor is not None and len(result.actor.steps) == planned
        assert all(len(update.steps) == config.critic.epochs * 2 for update in result.critics)
        assert len(result.critics) == config.critic.count
        losses = [step.loss for update in (result.actor, *result.critics) for step in update.steps]
        assert all(math.isfinite(loss) for loss in losses) and math.isfinite(metrics["advantage/std"])
    assert mean_reward(policy, truncated_is_wrong=finished) > before + LEAST_GAIN
    for critic, start in zip(critics, critic_weights, strict=True):
        weights = [weight.detach() for weight in critic.module.parameters()]
        assert any(not torch.equal(now, then) for now, then in zip(weights, start, strict=True))
