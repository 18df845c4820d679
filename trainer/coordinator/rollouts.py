"""From admitted draws to rewarded groups: many concurrent rollouts over the fleet."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from asyppo_async.errors import FleetOverloaded
from asyppo_async.trainer.coordinator.core import DecisionCore
from asyppo_async.trainer.coordinator.draws import Draw, Fate
from asyppo_async.trainer.coordinator.prompt_choices import teaches_nothing
from asyppo_async.trainer.coordinator.rewards import Failed, Late, RewardPool, Scored
from asyppo_async.trainer.coordinator.waits import Waits
from asyppo_async.types import Group, Prompt, Response, SamplingParams, Trajectory

_log = logging.getLogger(__name__)

OVERLOAD_PAUSE_S = 0.5
"""Pause before a server that had no room is asked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """The whole responses of one prompt, by sample index, and the server that made them."""

    responses: tuple[Response, ...]
    server: str


class Generator(Protocol):
    """The fleet, as a rollout sees it."""

    async def generate(
        self,
        prompt: Prompt,
        *,
        num_samples: int,
        sampling: SamplingParams,
        deadline_s: float,
        on_tokens: Callable[[int], None],
    ) -> Generated:
        """`on_tokens` is called with the tokens of all samples so far, whenever some arrive."""
        ...


Decode = Callable[[Sequence[int]], str]
"""Token ids of a response to the text that is scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    group_size: int
    sampling: SamplingParams
    group_deadline_s: float
    filter_groups: bool = False
    """Groups that are all right or all wrong are thrown away and replaced."""


class Rollouts:
    """Runs every draw that the core admits and keeps the finished groups until a step takes them."""

    def __init__(
        self,
        *,
        core: DecisionCore,
        prompts: Mapping[str, Prompt],
        generator: Generator,
        rewards: RewardPool,
        decode: Decode,
        settings: RolloutSettings,
        changed: asyncio.Condition,
        waits: Waits,
        on_group: Callable[[Group], None] = lambda group: None,
    ) -> None:
        """`on_group`: called with every group that is complete and rewarded, whatever becomes of it."""
        self._core = core
        self._prompts = prompts
        self._generator = generator
        self._rewards = rewards
        self._decode = decode
        self._settings = settings
        self._changed = changed
        self._waits = waits
        self._on_group = on_group
        self._groups: dict[int, Group] = {}
        self.lost_members: dict[str, int] = {}
        """Responses that were lost, by reason, over the run."""

    def take(self, draws: Sequence[Draw]) -> list[Group]:
        """Hand over the finished groups of a chosen batch."""
        return [self._groups.pop(draw.draw_id) for draw in draws]

    def prompt(self, prompt_id: str) -> Prompt:
        """The prompt of that id."""
        return self._prompts[prompt_id]

    def forget(self, fates: Sequence[Fate]) -> None:
        """Let go of finished groups that the core gave back or dropped while they were queued."""
        for fate in fates:
            # Not for `returned`: a new attempt of that draw may be queued by now.
            if fate.outcome in ("filtered", "dropped"):
                self._groups.pop(fate.draw.draw_id, None)

    async def run(self) -> None:
        """Start every draw that may be started.

        Consumes admissions of the core; produces finished groups; waits for admission room; unblocked by
        whatever changes the core (a finished group, a step, a publication).
        """
        async with asyncio.TaskGroup() as tasks:
            while True:
                for draw in await self._admitted():
                    tasks.create_task(self._roll_out(draw))

    async def _admitted(self) -> list[Draw]:
        async with self._changed:
            while not (draws := self._core.admit(time.monotonic())):
                with self._waits.waiting("rollouts", "admission of the next group"):
                    await self._changed.wait()
        return draws

    async def _roll_out(self, draw: Draw) -> None:
        prompt = self._prompts[draw.prompt_id]
        started_s = time.monotonic()
        with self._waits.waiting(f"group {draw.draw_id}", f"responses to prompt {prompt.id}"):
            try:
                async with asyncio.timeout(self._settings.group_deadline_s):
                    generated = await self._generate(draw, prompt)
                    group = await self._reward(draw, prompt, generated, started_s)
            except TimeoutError:
                _log.warning(
                    "group of prompt=%s not finished in %.0f s", prompt.id, self._settings.group_deadline_s
                )
                await self._fail(draw, "deadline")
                return
        await self._finish(draw, group)

    async def _generate(self, draw: Draw, prompt: Prompt) -> Generated:
        while True:
            try:
                return await self._generator.generate(
                    prompt,
                    num_samples=self._settings.group_size,
                    sampling=self._settings.sampling,
                    deadline_s=self._settings.group_deadline_s,
                    on_tokens=lambda num_tokens: self._note_tokens(draw, num_tokens),
                )
            except FleetOverloaded:
                await asyncio.sleep(OVERLOAD_PAUSE_S)  # back-off, bounded by the group's deadline

    def _note_tokens(self, draw: Draw, num_tokens: int) -> None:
        self._core.record_tokens(draw, num_tokens)
        self._waits.progress()

    async def _reward(self, draw: Draw, prompt: Prompt, generated: Generated, started_s: float) -> Group:
        async with asyncio.TaskGroup() as tasks:
            scores = [tasks.create_task(self._score(prompt, response)) for response in generated.responses]
        finished_s = time.monotonic()
        trajectories = tuple(
            Trajectory(
                prompt=prompt,
                draw_id=draw.draw_id,
                sample_index=index,
                response=response,
                reward=reward,
                server=generated.server,
                started_s=started_s,
                finished_s=finished_s,
            )
            for index, (response, score) in enumerate(zip(generated.responses, scores, strict=True))
            if (reward := score.result()) is not None
        )
        return Group(
            draw_id=draw.draw_id,
            prompt=prompt,
            admission_version=draw.admission_version,
            trajectories=trajectories,
            finished_s=finished_s,
        )

    async def _score(self, prompt: Prompt, response: Response) -> float | None:
        """The reward, or None for a lost member: a failed reward is never a reward of 0."""
        logprobs = response.behaviour_logprobs
        if not np.isfinite(logprobs).all() and (np.isnan(logprobs) | (logprobs == np.inf)).any():
            self._lose("non_finite_logprob", f"prompt={prompt.id}: a behaviour log-prob is not finite")
            return None
        outcome = await self._rewards.score(prompt, self._decode(response.token_ids.tolist()))
        match outcome:
            case Scored(value=value):
                return value
            case Late(deadline_s=deadline_s):
                self._lose("late_reward", f"prompt={prompt.id}: no reward within {deadline_s:g} s")
            case Failed(error=error):
                self._lose("failed_reward", f"prompt={prompt.id}: the reward failed: {error}")
        return None

    def _lose(self, reason: str, words: str) -> None:
        self.lost_members[reason] = self.lost_members.get(reason, 0) + 1
        _log.warning("%s; the response is lost", words)

    async def _finish(self, draw: Draw, group: Group) -> None:
        versions = [trajectory.response.versions for trajectory in group.trajectories]
        async with self._changed:
            if not versions:
                self._core.fail(draw, reason="all_members_lost", now_s=time.monotonic())
            elif (reason := self._judge(group)) is not None:
                self._core.record_tokens(draw, group.num_tokens)
                self._core.filter(draw, reason=reason, now_s=time.monotonic())
            else:
                answer = self._core.finish(
                    draw,
                    num_members=len(group.trajectories),
                    num_tokens=group.num_tokens,
                    oldest_version=min(int(run.min()) for run in versions),
                    newest_version=max(int(run.max()) for run in versions),
                    now_s=time.monotonic(),
                )
                if answer == "queued":
                    self._groups[draw.draw_id] = group
            self._changed.notify_all()
        self._waits.progress()

    def _judge(self, group: Group) -> str | None:
        self._on_group(group)
        return teaches_nothing(group) if self._settings.filter_groups else None

    async def _fail(self, draw: Draw, reason: str) -> None:
        async with self._changed:
            self._core.fail(draw, reason=reason, now_s=time.monotonic())
            self._changed.notify_all()
