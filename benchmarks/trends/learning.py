"""A whole run in one process: the trainer's own step, worker code and prompt selection around the tiny sampler.

What a study leaves out is what has no say in what is learned: engine, processes, sockets, the event loop's timing.
Staleness is given instead of arising: responses of step v come from the weights of version v - lag.
"""

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from asyppo_async.config.critic import CriticSection
from asyppo_async.config.sections import ActorSection, TrainConfig
from asyppo_async.metrics import Metrics
from asyppo_async.trainer.coordinator.batch import batch_of, truncated_reward
from asyppo_async.trainer.coordinator.choice_protocol import teaches_nothing
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
from asyppo_async.trainer.worker.critic_model import Critic
from asyppo_async.trainer.worker.messages import (
    ActorForward,
    ActorForwardResult,
    ActorTrain,
    CriticForward,
    CriticForwardResult,
    CriticTrain,
    TrainResult,
)
from asyppo_async.trainer.worker.model import Policy
from asyppo_async.trainer.worker.packing import Cutting
from asyppo_async.trainer.worker.reference import Reference
from asyppo_async.trainer.worker.specs import learning_rate_of
from asyppo_async.trainer.worker.steps import Stepper
from asyppo_async.trainer.worker.world import World
from asyppo_async.types import Group, Prompt, Response, SamplingParams, Trajectory
from benchmarks.trends.sampler import RoutingScript, TinySampler

M = TypeVar("M", bound=Message)
Reward = Callable[[Prompt, Sequence[int]], float]
MAX_TRIES = 50
"""Rounds of candidates for one batch; after that a batch is what it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What generation computes in: the real thing that engine and trainer disagree about."""

    name: str
    dtype: torch.dtype
    is_quantised: bool = False
    """Weights of linear layers are rounded to float8 with a scale per tensor; embedding, head and norms are not."""

    def copy_of(self, policy: Policy) -> Policy:
        """The policy as the engine holds it."""
        copied = Policy(copy.deepcopy(policy.module).to(self.dtype))
        self.load(copied, policy.module.state_dict())
        return copied

    def load(self, policy: Policy, weights: Mapping[str, torch.Tensor]) -> None:
        """Take new weights."""
        if self.is_quantised:
            weights = {
                name: _quantised(tensor) if "proj" in name else tensor for name, tensor in weights.items()
            }
        policy.module.load_state_dict(weights)


FLOAT32 = Engine(name="float32", dtype=torch.float32)
BFLOAT16 = Engine(name="bfloat16", dtype=torch.bfloat16)
FLOAT8_WEIGHTS = Engine(name="float8 weights", dtype=torch.bfloat16, is_quantised=True)


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
        engine: Engine | None = None,
        fixed_length: bool = False,
        script: RoutingScript | None = None,
    ) -> None:
        """`engine`: None computes as the trainer does; `fixed_length` and `script`: as in `TinySampler`.

        The reference of a KL, if the configuration asks for one, is the policy as it is now.
        """
        self.step = 0
        self.policy, self.critics = policy, tuple(critics)
        self._config, self._policy, self._reward = config, policy, reward
        table = PromptTable(config.selection)
        ids = [prompt.id for prompt in prompts]
        self._by_id = {prompt.id: prompt for prompt in prompts}
        self._selection = open_selection(config, ids, table)
        self._sampler: Sampler = self._selection or EpochSampler(
            prompt_ids=ids, seed=config.run.seed, num_epochs=None
        )
        self._runner = _runner(config, policy, critics, table)
        self._engine = engine or FLOAT32
        self._generating = self._engine.copy_of(policy)
        self._generation = TinySampler(
            self._generating,
            SamplingParams(
                temperature=config.sampling.temperature,
                top_p=config.sampling.top_p,
                top_k=config.sampling.top_k,
                min_tokens=0,
                max_tokens=config.sampling.max_tokens,
                stop_token_ids=stop_token_ids,
            ),
            torch.Generator().manual_seed(config.run.seed),
            fixed_length=fixed_length,
            script=script,
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
            found = await self._runner.critics.start_values(wanted, batch.step, trace)
            self._selection.score(found.means, found.stds)
        self.step += 1
        return result, step_metrics(result, trace)

    def _roll_out(self) -> list[Group]:
        """The groups of one batch, by the weights of `lag` versions ago."""
        config = self._config
        self._history.append(
            {name: tensor.clone() for name, tensor in self._policy.module.state_dict().items()}
        )
        version = self.step - len(self._history) + 1
        self._engine.load(self._generating, self._history[0])
        groups: list[Group] = []
        for attempt in range(MAX_TRIES):
            missing = config.batch.prompts - len(groups)
            if missing == 0:
                break
            fresh = self._sample(self._draw(missing), version)
            if config.selection.group_filter == "replace" and attempt < MAX_TRIES - 1:
                fresh = [group for group in fresh if teaches_nothing(group) is None]
            groups += fresh
        return groups

    def _draw(self, num: int) -> list[Prompt]:
        drawn: list[Prompt] = []
        while len(drawn) < num:
            candidate = self._sampler.next_candidate()
            if candidate.accepted:
                drawn.append(self._by_id[candidate.prompt_id])
        return drawn

    def _reward_of(self, prompt: Prompt, response: Response) -> float:
        fixed = truncated_reward(self._config.algorithm)
        if fixed is not None and response.finish_reason == "length":
            return fixed
        return self._reward(prompt, response.token_ids.tolist())

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
                        reward=self._reward_of(prompt, response),
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


def _quantised(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().max() / torch.finfo(torch.float8_e4m3fn).max
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


async def _no_batch_ahead() -> None:
    return None


def _over_the_wire(message: M) -> M:
    return expect(decode(encode(message)).message, type(message))


def _stepper(model: Policy | Critic, section: ActorSection | CriticSection, training_steps: int) -> Stepper:
    world = World.alone()
    backend = PlainBackend(
        model.module,
        model.root,
        world=world,
        learning_rate=learning_rate_of(section, training_steps),
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
    )
    return Stepper(
        backend,
        world,
        cutting=Cutting(budget_tokens=section.micro_batch_tokens),
        non_finite_budget=section.non_finite_budget,
    )


def _runner(config: TrainConfig, policy: Policy, critics: Sequence[Critic], table: PromptTable) -> StepRunner:
    """The coordinator's own step over groups that are objects of this process."""
    asked = config.actor.reference is not None
    actor = Actor(
        policy,
        _stepper(policy, config.actor, config.run.num_steps),
        reference=Reference(Policy(copy.deepcopy(policy.module))) if asked else None,
    )
    return StepRunner(config, LocalActor(actor), local_critics(config, critics), table)


def local_critics(config: TrainConfig, critics: Sequence[Critic]) -> tuple[LocalCritic, ...]:
    """Each critic with an optimizer of its own, as `config` says."""
    return tuple(
        LocalCritic(CriticLearner(critic, _stepper(critic, config.critic, config.run.num_steps)))
        for critic in critics
    )
