"""From admitted draws to rewarded groups: many concurrent rollouts over the fleet."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from asyppo_async.config.failures import FailuresSection
from asyppo_async.errors import ContractBroken
from asyppo_async.rpc.calls import ResponseParts
from asyppo_async.rpc.codec import SampleTokens
from asyppo_async.trainer.coordinator.begun_groups import BegunGroup, begun_group
from asyppo_async.trainer.coordinator.choice_protocol import teaches_nothing
from asyppo_async.trainer.coordinator.core import DecisionCore
from asyppo_async.trainer.coordinator.draws import Draw, Fate
from asyppo_async.trainer.coordinator.generated import Generated, Generator
from asyppo_async.trainer.coordinator.loop_meter import IdleClock
from asyppo_async.trainer.coordinator.lost_responses import LostResponses
from asyppo_async.trainer.coordinator.rewards import Failed, Late, RewardPool, Scored
from asyppo_async.trainer.coordinator.waits import Waits
from asyppo_async.types import Group, Prompt, Response, SamplingParams, Trajectory

Decode = Callable[[Sequence[int]], str]
"""Token ids of a response to the text that is scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    group_size: int
    sampling: SamplingParams
    group_deadline_s: float
    filter_groups: bool = False
    """Groups that are all right or all wrong are thrown away and replaced."""
    truncated_reward: float | None = None
    """Verdict on a response at maximum length, whatever its text; None: what the text earns."""


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
        groups: Sequence[Group] = (),
        begun: Mapping[int, Sequence[SampleTokens]] | None = None,
        lost: LostResponses | None = None,
        fleet: IdleClock | None = None,
    ) -> None:
        """`on_group`: called with every group that is complete and rewarded, whatever becomes of it.

        `groups`: what a resumed run starts with; `begun`: what it has, by draw, of those in flight. `lost`: counts and
        bounds what is lost. `fleet`: told while groups are generated.
        """
        self._core = core
        self._prompts = prompts
        self._generator = generator
        self._rewards = rewards
        self._decode = decode
        self._settings = settings
        self._changed = changed
        self._waits = waits
        self._on_group = on_group
        self._groups = {group.draw_id: group for group in groups}
        self._begun = dict(begun or {})
        self._parts: dict[Draw, ResponseParts] = {}
        """What has arrived, by attempt."""
        self._lost = lost or LostResponses(FailuresSection())
        self._fleet = fleet or IdleClock()

    @property
    def lost_members(self) -> Mapping[str, int]:
        """Responses that were lost, by reason, over the run."""
        return self._lost.by_reason

    def take(self, draws: Sequence[Draw]) -> list[Group]:
        """Hand over the finished groups of a chosen batch."""
        return [self._groups.pop(draw.draw_id) for draw in draws]

    def finished(self) -> tuple[Group, ...]:
        """The finished groups that no step has taken."""
        return tuple(self._groups.values())

    def begun(self) -> tuple[BegunGroup, ...]:
        """What has arrived of the groups that are in flight."""
        in_flight = {record.draw for record in self._core.live() if record.state == "in_flight"}
        begun = [begun_group(draw.draw_id, parts) for draw, parts in self._parts.items() if draw in in_flight]
        return tuple(group for group in begun if group is not None)

    @property
    def sampling(self) -> SamplingParams:
        """How everything is sampled."""
        return self._settings.sampling

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
        """Go on with the draws that a resumed run has in flight, and start every draw that may be started.

        Consumes admissions of the core; produces finished groups; waits for admission room; unblocked by
        whatever changes the core (a finished group, a step, a publication).
        """
        async with asyncio.TaskGroup() as tasks:
            for record in self._core.live():
                if record.state == "in_flight":
                    tasks.create_task(self._roll_out(record.draw))
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
        begun = self._begun.pop(draw.draw_id, ())
        self._parts[draw] = ResponseParts(self._settings.group_size, self._settings.sampling, begun)
        try:
            await self._generate_and_reward(draw)
        finally:
            del self._parts[draw]

    async def _generate_and_reward(self, draw: Draw) -> None:
        prompt = self._prompts[draw.prompt_id]
        started_s = time.monotonic()
        with self._waits.waiting(f"group {draw.draw_id}", f"responses to prompt {prompt.id}"):
            try:
                generated = await self._generate(draw, prompt, started_s + self._settings.group_deadline_s)
                texts = await decoded(generated.responses, self._decode, generated.server)
            except ContractBroken as error:
                # None of it can be trusted; another attempt, on whatever server, may be well.
                self._lost.lose("garbled", f"prompt={prompt.id}: {error}", self._settings.group_size)
                await self._fail(draw, "garbled")
                return
            reasons = [self._lose_sample(prompt, index, generated) for index in generated.missing]
            if not generated.responses:
                await self._fail(draw, reasons[0])
                return
            group = await self._reward(draw, prompt, generated, texts, started_s)
        await self._finish(draw, group)

    async def _generate(self, draw: Draw, prompt: Prompt, deadline_at_s: float) -> Generated:
        """What is finished by the deadline: a member that never returns is lost, and does not hold its group."""
        with self._fleet.busy():
            return await self._generator.generate(
                prompt,
                num_samples=self._settings.group_size,
                sampling=self._settings.sampling,
                deadline_s=deadline_at_s - time.monotonic(),
                on_server=lambda server: self._note_server(draw, server),
                on_tokens=lambda num_tokens: self._note_tokens(draw, num_tokens),
                parts=self._parts[draw],
            )

    def _note_server(self, draw: Draw, server: str) -> None:
        self._core.record_tokens(draw, 0, server)
        self._waits.place(f"group {draw.draw_id}", server)

    def _note_tokens(self, draw: Draw, num_tokens: int) -> None:
        self._core.record_tokens(draw, num_tokens)
        self._waits.progress()

    async def _reward(
        self, draw: Draw, prompt: Prompt, generated: Generated, texts: Sequence[str], started_s: float
    ) -> Group:
        async with asyncio.TaskGroup() as tasks:
            scores = [
                tasks.create_task(self._score(prompt, response, text))
                for response, text in zip(generated.responses, texts, strict=True)
            ]
        self._lost.keep(sum(score.result() is not None for score in scores))
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
            for index, response, score in zip(generated.indices, generated.responses, scores, strict=True)
            if (reward := score.result()) is not None
        )
        return Group(
            draw_id=draw.draw_id,
            prompt=prompt,
            admission_version=draw.admission_version,
            trajectories=trajectories,
            finished_s=finished_s,
        )

    async def _score(self, prompt: Prompt, response: Response, text: str) -> float | None:
        """The reward, or None for a lost member: a failed reward is never a reward of 0."""
        logprobs = response.behaviour_logprobs
        if not np.isfinite(logprobs).all() and (np.isnan(logprobs) | (logprobs == np.inf)).any():
            self._lost.lose("non_finite_logprob", f"prompt={prompt.id}: a behaviour log-prob is not finite")
            return None
        if self._settings.truncated_reward is not None and response.finish_reason == "length":
            return self._settings.truncated_reward
        outcome = await self._rewards.score(prompt, text)
        match outcome:
            case Scored(value=value):
                return value
            case Late():
                self._lost.lose("late_reward", f"prompt={prompt.id}: {outcome}")
            case Failed():
                self._lost.lose("failed_reward", f"prompt={prompt.id}: {outcome}")
        return None

    def _lose_sample(self, prompt: Prompt, index: int, generated: Generated) -> str:
        """Count a response that the fleet did not finish; returns why."""
        failure = generated.failures.get(index)
        reason = "deadline" if failure is None else failure.kind
        words = (
            f"not finished in {self._settings.group_deadline_s:g} s" if failure is None else failure.message
        )
        self._lost.lose(reason, f"prompt={prompt.id}: sample {index}: {words}")
        return reason

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
                    oldest_version=min(run.oldest for run in versions),
                    newest_version=max(run.newest for run in versions),
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


async def decoded(responses: Sequence[Response], decode: Decode, server: str) -> list[str]:
    """The texts of responses, made in a thread: those of one long group would hold the loop for too long.

    Raises:
        ContractBroken: `server` sent a token that is none of the actor's.
    """
    try:
        return await asyncio.to_thread(
            lambda: [decode(response.token_ids.tolist()) for response in responses]
        )
    except ValueError as error:
        raise ContractBroken(f"server {server}: breaks the contract: {error}") from error
