"""A policy in the middle of a study, sampled far beyond one batch: what the measurements beside learning look at.

Legend: B responses, T tokens of each, N = B T packed tokens.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asyppo_async.algorithms.logprobs import TokenDistribution, token_logprobs_and_entropy
from asyppo_async.trainer.worker.critic_model import Critic
from asyppo_async.trainer.worker.model import Policy
from asyppo_async.types import SamplingParams
from benchmarks.trends.arms import ACTOR_SIZE, Arm
from benchmarks.trends.learning import Engine, TinyRun
from benchmarks.trends.sampler import TinySampler
from benchmarks.trends.task import NUM_TOKENS, PROMPTS, open_study_run, reward

SAMPLES = 16
"""Responses of each prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Responses of an engine to every prompt of the study."""

    input_ids: Tensor
    """[B, P + T]"""
    behaviour_logprobs: Tensor
    """[N]"""
    rewards: Tensor
    """[B]"""
    group_ids: Tensor
    """[B]"""

    @property
    def lengths(self) -> Tensor:
        return torch.full((len(self.rewards),), NUM_TOKENS)

    @property
    def states(self) -> Tensor:
        """[N] flat positions of the state before each token."""
        length = self.input_ids.shape[1]
        rows = torch.arange(len(self.input_ids)).unsqueeze(1) * length
        return (rows + torch.arange(length - NUM_TOKENS - 1, length - 1)).flatten()

    def distribution(self, policy: Policy) -> TokenDistribution:
        """Of the trainer's policy, with gradient."""
        hidden = policy.hidden_states(self.input_ids).flatten(0, 1)[self.states]
        tokens = self.input_ids[:, -NUM_TOKENS:].flatten()
        return token_logprobs_and_entropy(
            hidden, policy.head_weight, tokens, temperature=1.0, chunk_tokens=2**16
        )

    def values(self, critics: Sequence[Critic]) -> Tensor:
        """[M, N]"""
        with torch.inference_mode():
            return torch.stack([critic.values(self.input_ids, self.states) for critic in critics])


def sample_all(policy: Policy, engine: Engine, seed: int, *, num_samples: int = SAMPLES) -> Sampled:
    """`num_samples` responses to every prompt."""
    sampling = SamplingParams(
        temperature=1.0, top_p=1.0, top_k=0, min_tokens=0, max_tokens=NUM_TOKENS, stop_token_ids=()
    )
    sampler = TinySampler(
        engine.copy_of(policy), sampling, torch.Generator().manual_seed(seed), fixed_length=True
    )
    groups = sampler.sample(PROMPTS, num_samples=num_samples, version=0)
    members = [(prompt, one) for prompt, group in zip(PROMPTS, groups, strict=True) for one in group]
    return Sampled(
        input_ids=torch.tensor([[*prompt.token_ids, *one.token_ids.tolist()] for prompt, one in members]),
        behaviour_logprobs=torch.cat([torch.from_numpy(one.behaviour_logprobs) for _, one in members]),
        rewards=torch.tensor([reward(prompt, one.token_ids.tolist()) for prompt, one in members]),
        group_ids=torch.arange(len(PROMPTS)).repeat_interleave(num_samples),
    )


def at_stages(arm: Arm, seed: int, stages: Sequence[int]) -> Iterator[tuple[int, TinyRun]]:
    """The arm's run after each of so many steps."""
    run = open_study_run(
        arm.config(seed), lag=arm.lag, actor_size=ACTOR_SIZE, critic_size=arm.critic_size, engine=arm.engine
    )
    for stage in stages:
        while run.step < stage:
            asyncio.run(run.train())
        yield stage, run
