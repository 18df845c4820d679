"""A whole run in one process: the trainer's own step, worker code and prompt selection around the tiny sampler.

What a study leaves out is what has no say in what is learned: engine, processes, sockets, the event loop's timing.
Staleness is given instead of arising: responses of step v come from the weights of version v - lag.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from asyppo_async.config.sections import ActorSection, CriticSection, TrainConfig
from asyppo_async.metrics import Metrics
from asyppo_async.trainer.coordinator.batch import batch_of
from asyppo_async.trainer.coordinator.prompt_choices import teaches_nothing
from asyppo_async.trainer.coordinator.prompt_table import PromptTable
from asyppo_async.trainer.coordinator.report import step_metrics
from asyppo_async.trainer.coordinator.sampler import EpochSampler, Sampler
from asyppo_async.trainer.coordinator.selection import open_selection
from asyppo_async.trainer.coordinator.step import StepResult, StepRunner
from asyppo_async.trainer.coordinator.trace import Trace
from asyppo_async.trainer.worker.actor import Actor
from asyppo_async.trainer.worker.backend.plain import PlainBackend
from asyppo_async.trainer.worker.codec import Message, decode, encode, expect
from asyppo_async.trainer.worker.critic import CriticLearner
from asyppo_async.trainer.worker.messages import (
    ActorForward,
    ActorForwardResult,
    ActorTrain,
    CriticForward,
    CriticForwardResult,
    CriticTrain,
    TrainResult,
)
from asyppo_async.trainer.worker.model import Critic, Policy
from asyppo_async.trainer.worker.steps import Stepper
from asyppo_async.trainer.worker.world import World
from asyppo_async.types import Group, Prompt, SamplingParams, Trajectory
from benchmarks.trends.sampler import TinySampler

M = TypeVar("M", bound=Message)
Reward = Callable[[Prompt, Sequence[int]], float]
MAX_TRIES = 50
"""Rounds of candidates for one batch; after that a batch is what it is."""


class LocalActor:
    """The actor group of one rank, in this process; every request goes through the codec, as on the wire."""

    def __init__(self, learner: Actor) -> None:
        self._learner = learner

    async def forward(self, request: ActorForward) -> ActorForwardResult:
        return self._learner.forward(_over_the_wire(request))

    async def train(self, request: ActorTrain) -> TrainResult:
        return self._learner.train(_over_the_wire(request))


class LocalCritic:
    """A critic group, likewise."""

    def __init__(self, learner: CriticLearner) -> None:
        self._learner = learner

    async def forward(self, request: CriticForward) -> CriticForwardResult:
        return self._learner.forward(_over_the_wire(request))

    async def train(self, request: CriticTrain) -> TrainResult:
        return self._learner.train(_over_the_wire(request))


class TinyRun:
    """Steps one after the other; `policy` and `critics` are trained in place."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        policy: Policy,
        critics: Sequence[Critic],
        prompts: Sequence[Prompt],
        reward: Reward,
        stop_token_ids: tuple[int, ...],
        lag: int = 0,
    ) -> None:
        self.step = 0
        self._config, self._policy, self._reward = config, policy, reward
        table = PromptTable(config.selection)
        ids = [prompt.id for prompt in prompts]
        self._by_id = {prompt.id: prompt for prompt in prompts}
        self._selection = open_selection(config, ids, table)
        self._sampler: Sampler = self._selection or EpochSampler(
            prompt_ids=ids, seed=config.run.seed, num_epochs=None
        )
        self._runner = StepRunner(
            config,
            LocalActor(
                Actor(
                    self._policy,
                    _stepper(self._policy.module, config.actor),
                    micro_batch_tokens=config.actor.micro_batch_tokens,
                )
            ),
            tuple(
                LocalCritic(
                    CriticLearner(
                        critic,
                        _stepper(critic.module, config.critic),
                        micro_batch_tokens=config.critic.micro_batch_tokens,
                    )
                )
                for critic in critics
            ),
            table,
        )
        self._generation = TinySampler(
            self._policy,
            SamplingParams(
                temperature=config.sampling.temperature,
                top_p=config.sampling.top_p,
                top_k=config.sampling.top_k,
                min_tokens=0,
                max_tokens=config.sampling.max_tokens,
                stop_token_ids=stop_token_ids,
            ),
            torch.Generator().manual_seed(config.run.seed),
        )
        self._history: deque[dict[str, torch.Tensor]] = deque(maxlen=lag + 1)
        self._num_draws = 0

    async def train(self) -> tuple[StepResult, Metrics]:
        """One training step."""
        batch = batch_of(self.step, self._roll_out(), self._config)
        trace = Trace()
        result = await self._runner.run(batch, trace, _no_batch_ahead)
        if self._selection is not None:
            steps = () if result.actor is None else result.actor.steps
            self._selection.end_step(sum(not step.skipped for step in steps))
            wanted = [self._by_id[prompt_id] for prompt_id in self._selection.upcoming()]
            self._selection.score(await self._runner.start_values(wanted, batch.step, trace))
        self.step += 1
        return result, step_metrics(result, trace)

    def _roll_out(self) -> list[Group]:
        """The groups of one batch, by the weights of `lag` versions ago."""
        module, config = self._policy.module, self._config
        present = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        self._history.append(present)
        version = self.step - len(self._history) + 1
        module.load_state_dict(self._history[0])
        groups: list[Group] = []
        for attempt in range(MAX_TRIES):
            missing = config.batch.prompts - len(groups)
            if missing == 0:
                break
            fresh = self._sample(self._draw(missing), version)
            if config.selection.group_filter == "replace" and attempt < MAX_TRIES - 1:
                fresh = [group for group in fresh if teaches_nothing(group) is None]
            groups += fresh
        module.load_state_dict(present)
        return groups

    def _draw(self, num: int) -> list[Prompt]:
        drawn: list[Prompt] = []
        while len(drawn) < num:
            candidate = self._sampler.next_candidate()
            if candidate.accepted:
                drawn.append(self._by_id[candidate.prompt_id])
        return drawn

    def _sample(self, prompts: Sequence[Prompt], version: int) -> list[Group]:
        sampled = self._generation.sample(prompts, num_samples=self._config.batch.group_size, version=version)
        groups = []
        for prompt, responses in zip(prompts, sampled, strict=True):
            group = Group(
                draw_id=self._num_draws,
                prompt=prompt,
                admission_version=version,
                trajectories=tuple(
                    Trajectory(
                        prompt=prompt,
                        draw_id=self._num_draws,
                        sample_index=index,
                        response=response,
                        reward=self._reward(prompt, response.token_ids.tolist()),
                        server="tiny",
                        started_s=0.0,
                        finished_s=0.0,
                    )
                    for index, response in enumerate(responses)
                ),
                finished_s=0.0,
            )
            self._num_draws += 1
            if self._selection is not None:
                self._selection.record(group)
            groups.append(group)
        return groups


async def _no_batch_ahead() -> None:
    return None


def _over_the_wire(message: M) -> M:
    return expect(decode(encode(message)).message, type(message))


def _stepper(module: torch.nn.Module, section: ActorSection | CriticSection) -> Stepper:
    world = World.alone()
    backend = PlainBackend(
        module,
        world=world,
        learning_rate=section.learning_rate,
        weight_decay=section.weight_decay,
        warmup_steps=section.warmup_steps,
        max_grad_norm=section.max_grad_norm,
    )
    return Stepper(
        backend,
        world,
        micro_batch_tokens=section.micro_batch_tokens,
        non_finite_budget=section.non_finite_budget,
    )
