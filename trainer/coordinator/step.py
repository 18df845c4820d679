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
from numpy.typing import NDArray

from asyppo_async.algorithms.mismatch import MismatchCorrection
from asyppo_async.config.sections import TrainConfig
from asyppo_async.trainer.coordinator.arithmetic import (
    TokenDecisions,
    actor_request,
    critic_requests,
    decide_tokens,
)
from asyppo_async.trainer.coordinator.batch import Batch
from asyppo_async.trainer.coordinator.staleness import token_bound
from asyppo_async.trainer.coordinator.trace import Trace
from asyppo_async.trainer.worker.messages import (
    ActorForward,
    ActorForwardResult,
    ActorTrain,
    CriticForward,
    CriticForwardResult,
    CriticTrain,
    TrainResult,
)
from asyppo_async.types import Float32Array

BatchAhead = Callable[[], Awaitable[Batch | None]]
"""Waits for the batch of the next step; None if there is none."""


class Actor(Protocol):
    """The actor group, as a step sees it."""

    async def forward(self, request: ActorForward) -> ActorForwardResult: ...

    async def train(self, request: ActorTrain) -> TrainResult: ...


class Critic(Protocol):
    """A critic group, as a step sees it."""

    async def forward(self, request: CriticForward) -> CriticForwardResult: ...

    async def train(self, request: CriticTrain) -> TrainResult: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticPart:
    """What the critics gave for one batch."""

    values_before: NDArray[np.float32] | None
    """[M, N] before their update, where it was needed."""
    values: NDArray[np.float32]
    """[M, N] that the advantages are made from."""
    results: tuple[TrainResult, ...]
    """One per critic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Everything that one step computed, for the metrics."""

    batch: Batch
    values_before: NDArray[np.float32] | None
    values: NDArray[np.float32]
    proximal_logprobs: Float32Array
    decisions: TokenDecisions
    critics: tuple[TrainResult, ...]
    actor: TrainResult | None
    """None: no token had weight, so there was no optimizer step."""

    @property
    def mismatch(self) -> MismatchCorrection:
        return self.decisions.mismatch


class StepRunner:
    """Runs steps over an actor group and M critic groups."""

    def __init__(self, config: TrainConfig, actor: Actor, critics: tuple[Critic, ...]) -> None:
        self._config = config
        self._actor = actor
        self._critics = critics
        self._ahead: tuple[int, CriticPart] | None = None

    async def run(self, batch: Batch, trace: Trace, batch_ahead: BatchAhead) -> StepResult:
        """One step by the configured schedule.

        Args:
            batch: Of this step.
            trace: Receives the spans.
            batch_ahead: Read by `critic_ahead` only.
        """
        if self._config.algorithm.schedule == "pre":
            return await self._pre(batch, trace)
        if self._config.algorithm.schedule == "post":
            return await self._post(batch, trace)
        return await self._critic_ahead(batch, trace, batch_ahead)

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
        return _result(batch, critic_part, proximal, decisions, actor)

    async def _pre(self, batch: Batch, trace: Trace) -> StepResult:
        async with asyncio.TaskGroup() as tasks:
            values_task = tasks.create_task(self._values(batch, trace))
            proximal_task = tasks.create_task(self._proximal(batch, trace))
        values, proximal = values_task.result(), proximal_task.result()
        decisions = await self._decide(batch, trace, values, proximal)
        async with asyncio.TaskGroup() as tasks:
            actor_task = tasks.create_task(self._train_actor(batch, trace, decisions, proximal))
            critic_task = tasks.create_task(
                self._train_critics(batch, trace, values, decisions.masks.value.numpy())
            )
        critic_part = CriticPart(values_before=values, values=values, results=critic_task.result())
        return _result(batch, critic_part, proximal, decisions, actor_task.result())

    async def _critic_ahead(self, batch: Batch, trace: Trace, batch_ahead: BatchAhead) -> StepResult:
        async with asyncio.TaskGroup() as tasks:
            critic_task = tasks.create_task(self._ahead_or_now(batch, trace))
            proximal_task = tasks.create_task(self._proximal(batch, trace))
        critic_part, proximal = critic_task.result(), proximal_task.result()
        decisions = await self._decide(batch, trace, critic_part.values, proximal)
        async with asyncio.TaskGroup() as tasks:
            actor_task = tasks.create_task(self._train_actor(batch, trace, decisions, proximal))
            tasks.create_task(self._train_ahead(trace, batch_ahead))
        return _result(batch, critic_part, proximal, decisions, actor_task.result())

    async def _ahead_or_now(self, batch: Batch, trace: Trace) -> CriticPart:
        if self._ahead is not None and self._ahead[0] == batch.step:
            return self._ahead[1]
        return await self._critic_part(batch, trace, None)  # the first step: nobody trained ahead of it

    async def _train_ahead(self, trace: Trace, batch_ahead: BatchAhead) -> None:
        following = await batch_ahead()
        self._ahead = None
        if following is not None:
            self._ahead = (following.step, await self._critic_part(following, trace, None))

    async def _critic_part(self, batch: Batch, trace: Trace, proximal: Float32Array | None) -> CriticPart:
        """Critics first: update on the batch, then values of the batch."""
        algorithm = self._config.algorithm
        needs_values = (
            algorithm.lambda_critic < 1 or self._config.critic.value_clip is not None or proximal is not None
        )
        before = await self._values(batch, trace) if needs_values else None
        if proximal is not None and before is not None:
            trained = (await self._decide(batch, trace, before, proximal)).masks.value.numpy()
        else:
            trained = np.ones(batch.sequences.num_response_tokens, dtype=np.bool_)
        results = await self._train_critics(batch, trace, before, trained)
        return CriticPart(values_before=before, values=await self._values(batch, trace), results=results)

    async def _proximal(self, batch: Batch, trace: Trace) -> Float32Array:
        request = ActorForward(sequences=batch.sequences, temperature=self._config.sampling.temperature)
        with trace.span("actor_forward", batch.step):
            return (await self._actor.forward(request)).logprobs

    async def _values(self, batch: Batch, trace: Trace) -> NDArray[np.float32]:
        request = CriticForward(sequences=batch.sequences)

        async def of(critic: Critic) -> Float32Array:
            with trace.span("critic_forward", batch.step):
                return (await critic.forward(request)).values

        async with asyncio.TaskGroup() as tasks:
            values = [tasks.create_task(of(critic)) for critic in self._critics]
        return np.stack([value.result() for value in values])

    async def _decide(
        self, batch: Batch, trace: Trace, values: NDArray[np.float32], proximal: Float32Array
    ) -> TokenDecisions:
        staleness = self._config.staleness
        stale = batch.versions < token_bound(step=batch.step, max_staleness=staleness.max_staleness)
        with trace.span("arithmetic", batch.step):
            return await asyncio.to_thread(
                decide_tokens, batch, values, proximal, stale=stale, algorithm=self._config.algorithm
            )

    async def _train_actor(
        self, batch: Batch, trace: Trace, decisions: TokenDecisions, proximal: Float32Array
    ) -> TrainResult | None:
        if not decisions.trainable:
            return None
        config = self._config
        request = await asyncio.to_thread(
            actor_request,
            batch,
            decisions,
            proximal,
            algorithm=config.algorithm,
            actor=config.actor,
            sampling=config.sampling,
            seed=config.run.seed,
        )
        with trace.span("actor_train", batch.step):
            return await self._actor.train(request)

    async def _train_critics(
        self,
        batch: Batch,
        trace: Trace,
        values: NDArray[np.float32] | None,
        trained: NDArray[np.bool_],
    ) -> tuple[TrainResult, ...]:
        config = self._config
        if values is None:
            shape = (len(self._critics), batch.sequences.num_response_tokens)
            values = np.zeros(shape, dtype=np.float32)
        requests = await asyncio.to_thread(
            critic_requests,
            batch,
            values=values,
            trained=trained,
            algorithm=config.algorithm,
            critic=config.critic,
            seed=config.run.seed,
        )

        async def of(critic: Critic, request: CriticTrain) -> TrainResult:
            with trace.span("critic_train", batch.step):
                return await critic.train(request)

        async with asyncio.TaskGroup() as tasks:
            results = [
                tasks.create_task(of(critic, request))
                for critic, request in zip(self._critics, requests, strict=True)
            ]
        return tuple(result.result() for result in results)


def _result(
    batch: Batch,
    critic_part: CriticPart,
    proximal: Float32Array,
    decisions: TokenDecisions,
    actor: TrainResult | None,
) -> StepResult:
    return StepResult(
        batch=batch,
        values_before=critic_part.values_before,
        values=critic_part.values,
        proximal_logprobs=proximal,
        decisions=decisions,
        critics=critic_part.results,
        actor=actor,
    )
