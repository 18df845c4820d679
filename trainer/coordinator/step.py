"""One training step: which group computes what, when, on which batch.

post          critics train beside the actor's proximal forward, then critic values, arithmetic, actor trains
              (AsyPPO, Algorithm 1: the advantages come from the updated critics)
pre           critic values beside the proximal forward, arithmetic, then actor and critics train at once
              (S3AC, VC-PPO: the advantages come from the critics as they were)
critic_ahead  post, with the critics already on the batch of step v + 1 while the actor trains on that of v
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from asyppo_async.algorithms.group_advantages import mixed_groups
from asyppo_async.algorithms.mismatch import MismatchCorrection
from asyppo_async.config.algorithm import AlgorithmSection
from asyppo_async.config.sections import TrainConfig
from asyppo_async.trainer.coordinator.arithmetic import TokenDecisions, actor_request, decide_tokens
from asyppo_async.trainer.coordinator.batch import Batch
from asyppo_async.trainer.coordinator.critic_side import Critic, CriticPart, CriticSide, CriticValues
from asyppo_async.trainer.coordinator.estimators import Baselines
from asyppo_async.trainer.coordinator.loss_terms import proximal_by_age
from asyppo_async.trainer.coordinator.memory import StepMemory
from asyppo_async.trainer.coordinator.prompt_table import PromptTable
from asyppo_async.trainer.coordinator.staleness import token_bound
from asyppo_async.trainer.coordinator.trace import Trace
from asyppo_async.trainer.worker.messages import ActorForward, ActorForwardResult, ActorTrain, TrainResult
from asyppo_async.types import BoolArray, Float32Array

BatchAhead = Callable[[], Awaitable[Batch | None]]
"""Waits for the batch of the next step; None if there is none."""


class Actor(Protocol):
    """The actor group, as a step sees it."""

    async def forward(self, request: ActorForward) -> ActorForwardResult: ...

    async def train(self, request: ActorTrain) -> TrainResult: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Proximal:
    """The actor's view of the batch at the start of the step."""

    logprobs: Float32Array
    """[N]"""
    entropies: Float32Array
    """[N]"""
    reference_logprobs: Float32Array | None
    """[N] of the frozen reference; None: the run has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Everything that one step computed, for the metrics."""

    batch: Batch
    values_before: NDArray[np.float32] | None
    values: NDArray[np.float32]
    proximal_logprobs: Float32Array
    proximal_entropies: Float32Array
    reference_logprobs: Float32Array | None
    algorithm: AlgorithmSection
    """What the batch was decided by."""
    decisions: TokenDecisions
    critics: tuple[TrainResult, ...]
    actor: TrainResult | None
    """None: no optimizer step, for no token had weight, or the critics are still warming up."""
    actor_clip_norm: float
    """Norm that the actor's gradients are clipped to; `critic_clip_norm` likewise, of each critic on its own."""
    critic_clip_norm: float

    @property
    def mismatch(self) -> MismatchCorrection:
        return self.decisions.mismatch


class StepRunner:
    """Runs steps over an actor group and M critic groups."""

    def __init__(
        self,
        config: TrainConfig,
        actor: Actor,
        critics: tuple[Critic, ...],
        table: PromptTable | None = None,
        memory: StepMemory | None = None,
    ) -> None:
        """`table`: of the prompts' running values; one is made if it is needed and not shared.

        `memory`: of the steps before, in a resumed run.
        """
        self._config = config
        self._actor = actor
        self.critics = CriticSide(config, critics)
        self.table = table or PromptTable(config.selection)
        self.memory = memory or StepMemory()
        self._ahead: tuple[int, CriticPart] | None = None
        self._priors: NDArray[np.float64] | None = None
        """[B] of the batch of the present step (SPO)."""

    @property
    def is_ahead(self) -> bool:
        """Whether the critics have trained on a batch that the actor has not seen: no state to save."""
        return self._ahead is not None

    async def run(self, batch: Batch, trace: Trace, batch_ahead: BatchAhead) -> StepResult:
        """One step by the configured schedule.

        Args:
            batch: Of this step.
            trace: Receives the spans.
            batch_ahead: Read by `critic_ahead` only.
        """
        self._priors = self.table.take(batch) if self._config.algorithm.estimator == "spo" else None
        if self._config.algorithm.schedule == "pre":
            result = await self._pre(batch, trace)
        elif self._config.algorithm.schedule == "post":
            result = await self._post(batch, trace)
        else:
            result = await self._critic_ahead(batch, trace, batch_ahead)
        self.memory = result.decisions.memory
        if result.actor is not None:
            moved = [update.kl_proximal for update in result.actor.steps if not update.skipped]
            self.table.advance(float(np.nansum(moved)) / max(1, len(moved)))
        return result

    async def _post(self, batch: Batch, trace: Trace) -> StepResult:
        if self._config.algorithm.critic_trains_on == "kept":
            proximal = await self._proximal(batch, trace)
            critic_part = await self._critic_part(batch, trace, proximal)
        else:
            async with asyncio.TaskGroup() as tasks:
                critic_task = tasks.create_task(self._critic_part(batch, trace, None))
                proximal_task = tasks.create_task(self._proximal(batch, trace))
            critic_part, proximal = critic_task.result(), proximal_task.result()
        decisions = await self._decide(batch, trace, critic_part.values, proximal)
        actor = await self._train_actor(batch, trace, decisions, proximal)
        return self._result(batch, critic_part, proximal, decisions, actor)

    async def _pre(self, batch: Batch, trace: Trace) -> StepResult:
        async with asyncio.TaskGroup() as tasks:
            values_task = tasks.create_task(self.critics.values(batch, trace))
            proximal_task = tasks.create_task(self._proximal(batch, trace))
        values, proximal = values_task.result(), proximal_task.result()
        decisions = await self._decide(batch, trace, values, proximal)
        async with asyncio.TaskGroup() as tasks:
            actor_task = tasks.create_task(self._train_actor(batch, trace, decisions, proximal))
            critic_task = tasks.create_task(
                self.critics.train(batch, trace, values.of_tokens, decisions.masks.value.numpy())
            )
        critic_part = CriticPart(values_before=values.of_tokens, values=values, results=critic_task.result())
        return self._result(batch, critic_part, proximal, decisions, actor_task.result())

    async def _critic_ahead(self, batch: Batch, trace: Trace, batch_ahead: BatchAhead) -> StepResult:
        async with asyncio.TaskGroup() as tasks:
            critic_task = tasks.create_task(self._ahead_or_now(batch, trace))
            proximal_task = tasks.create_task(self._proximal(batch, trace))
        critic_part, proximal = critic_task.result(), proximal_task.result()
        decisions = await self._decide(batch, trace, critic_part.values, proximal)
        async with asyncio.TaskGroup() as tasks:
            actor_task = tasks.create_task(self._train_actor(batch, trace, decisions, proximal))
            tasks.create_task(self._train_ahead(trace, batch_ahead))
        return self._result(batch, critic_part, proximal, decisions, actor_task.result())

    async def _ahead_or_now(self, batch: Batch, trace: Trace) -> CriticPart:
        if self._ahead is not None and self._ahead[0] == batch.step:
            return self._ahead[1]
        return await self._critic_part(batch, trace, None)  # the first step: nobody trained ahead of it

    async def _train_ahead(self, trace: Trace, batch_ahead: BatchAhead) -> None:
        following = await batch_ahead()
        self._ahead = None
        if following is not None:
            self._ahead = (following.step, await self._critic_part(following, trace, None))

    async def _critic_part(self, batch: Batch, trace: Trace, proximal: Proximal | None) -> CriticPart:
        """Critics first: update on the batch, then values of the batch."""
        algorithm = self._config.algorithm
        before_serves = algorithm.advantage_values == "pre"
        needs_values = (
            algorithm.lambda_critic < 1
            or self._config.critic.value_clip is not None
            or proximal is not None
            or before_serves
        )
        before = await self.critics.values(batch, trace) if needs_values else None
        trained = np.ones(batch.sequences.num_response_tokens, dtype=np.bool_)
        if proximal is not None and before is not None:
            trained = (await self._decide(batch, trace, before, proximal)).masks.value.numpy()
        old = None if before is None else before.of_tokens
        results = await self.critics.train(batch, trace, old, trained)
        values = before if before_serves else None
        return CriticPart(
            values_before=old, values=values or await self.critics.values(batch, trace), results=results
        )

    async def _proximal(self, batch: Batch, trace: Trace) -> Proximal:
        sampling = self._config.sampling
        request = ActorForward(
            sequences=batch.sequences,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            routed_experts=batch.routed_experts,
            with_reference=self._config.actor.reference is not None,
        )
        with trace.span("actor_forward", batch.step):
            result = await self._actor.forward(request)
        logprobs = result.logprobs
        if self._config.algorithm.proximal == "a3po":
            logprobs = proximal_by_age(batch, logprobs)
        return Proximal(
            logprobs=logprobs, entropies=result.entropies, reference_logprobs=result.reference_logprobs
        )

    async def _decide(
        self, batch: Batch, trace: Trace, values: CriticValues, proximal: Proximal
    ) -> TokenDecisions:
        config = self._config
        stale = batch.versions < token_bound(step=batch.step, max_staleness=config.staleness.max_staleness)
        baselines = Baselines(
            values=values.of_tokens,
            end_values=values.of_ends,
            priors=self._priors,
            reference_logprobs=proximal.reference_logprobs,
        )
        with trace.span("arithmetic", batch.step):
            return await asyncio.to_thread(
                decide_tokens,
                batch,
                values.of_tokens,
                proximal.logprobs,
                stale=stale,
                algorithm=config.algorithm,
                baselines=baselines,
                filtered=self._filtered(batch),
                entropies=proximal.entropies,
                seed=config.run.seed,
                memory=self.memory,
            )

    def _filtered(self, batch: Batch) -> BoolArray | None:
        if self._config.selection.group_filter != "mask":
            return None
        mixed = mixed_groups(torch.from_numpy(batch.correct), torch.from_numpy(batch.group_ids))
        return np.asarray(~mixed.numpy())

    async def _train_actor(
        self, batch: Batch, trace: Trace, decisions: TokenDecisions, proximal: Proximal
    ) -> TrainResult | None:
        config = self._config
        if batch.step < config.critic.warmup_steps or not decisions.trainable:
            return None
        request = await asyncio.to_thread(
            actor_request,
            batch,
            decisions,
            proximal.logprobs,
            algorithm=config.algorithm,
            actor=config.actor,
            sampling=config.sampling,
            seed=config.run.seed,
            reference_logprobs=proximal.reference_logprobs,
        )
        with trace.span("actor_train", batch.step):
            return await self._actor.train(request)

    def _result(
        self,
        batch: Batch,
        critic_part: CriticPart,
        proximal: Proximal,
        decisions: TokenDecisions,
        actor: TrainResult | None,
    ) -> StepResult:
        return StepResult(
            batch=batch,
            values_before=critic_part.values_before,
            values=critic_part.values.of_tokens,
            proximal_logprobs=proximal.logprobs,
            proximal_entropies=proximal.entropies,
            algorithm=self._config.algorithm,
            reference_logprobs=proximal.reference_logprobs,
            decisions=decisions,
            critics=critic_part.results,
            actor=actor,
            actor_clip_norm=self._config.actor.max_grad_norm,
            critic_clip_norm=self._config.critic.max_grad_norm,
        )
