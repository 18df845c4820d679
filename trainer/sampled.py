"""Responses outside a run's own loop: sampled from the weights that the fleet serves, and scored."""

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from asyppo_async.config.sections import TrainConfig
from asyppo_async.trainer.coordinator.batch import truncated_reward
from asyppo_async.trainer.coordinator.generated import Generator
from asyppo_async.trainer.coordinator.rewards import RewardPool, Scored
from asyppo_async.trainer.coordinator.rollouts import decoded
from asyppo_async.trainer.material import Material
from asyppo_async.types import Group, Prompt, Response, Trajectory

_log = logging.getLogger(__name__)

MAX_CONCURRENT_PROMPTS = 64


@dataclass(slots=True)
class Sampling:
    """Draws groups of responses, many prompts at a time."""

    config: TrainConfig
    material: Material
    generator: Generator
    rewards: RewardPool
    num_lost: int = 0
    """Responses without a reward or not finished in time, so far."""
    _num_draws: int = 0

    async def groups(self, prompts: Iterable[Prompt], num_samples: int) -> list[Group]:
        """`num_samples` responses to each prompt, in its order; a group may have lost members, and may be missing.

        Consumes prompts; produces groups; waits for the fleet and the reward processes, each with its deadline.
        """
        room = asyncio.Semaphore(MAX_CONCURRENT_PROMPTS)

        async def one(prompt: Prompt, draw_id: int) -> Group:
            async with room:
                return await self._group(prompt, draw_id, num_samples)

        async with asyncio.TaskGroup() as tasks:
            drawn = []
            for prompt in prompts:
                drawn.append(tasks.create_task(one(prompt, self._num_draws)))
                self._num_draws += 1
        groups = [task.result() for task in drawn]
        return [group for group in groups if group.trajectories]

    async def _group(self, prompt: Prompt, draw_id: int, num_samples: int) -> Group:
        started_s = time.monotonic()
        generated = await self.generator.generate(
            prompt,
            num_samples=num_samples,
            sampling=self.material.sampling,
            deadline_s=self.config.fleet.group_deadline_s,
            on_tokens=lambda _: None,
            on_server=lambda _: None,
        )
        texts = await decoded(generated.responses, self.material.decode, generated.server)
        async with asyncio.TaskGroup() as tasks:
            scores = [
                tasks.create_task(self._score(prompt, response, text))
                for response, text in zip(generated.responses, texts, strict=True)
            ]
        rewards = [score.result() for score in scores]
        self.num_lost += num_samples - sum(reward is not None for reward in rewards)
        finished_s = time.monotonic()
        return Group(
            draw_id=draw_id,
            prompt=prompt,
            admission_version=0,
            trajectories=tuple(
                Trajectory(
                    prompt=prompt,
                    draw_id=draw_id,
                    sample_index=index,
                    response=response,
                    reward=reward,
                    server=generated.server,
                    started_s=started_s,
                    finished_s=finished_s,
                )
                for index, response, reward in zip(
                    generated.indices, generated.responses, rewards, strict=True
                )
                if reward is not None
            ),
            finished_s=finished_s,
        )

    async def _score(self, prompt: Prompt, response: Response, text: str) -> float | None:
        if not np.isfinite(response.behaviour_logprobs).all():
            return None
        fixed = truncated_reward(self.config.algorithm)
        if fixed is not None and response.finish_reason == "length":
            return fixed
        outcome = await self.rewards.score(prompt, text)
        if isinstance(outcome, Scored):
            return outcome.value
        _log.warning("prompt=%s: %s; the response is lost", prompt.id, outcome)
        return None
