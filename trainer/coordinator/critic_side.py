"""The critics of a step: their values of a batch and of prompts, and their update."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from asyppo_async.config.sections import TrainConfig
from asyppo_async.trainer.coordinator.arithmetic import critic_requests
from asyppo_async.trainer.coordinator.batch import Batch, with_end_states
from asyppo_async.trainer.coordinator.trace import Trace
from asyppo_async.trainer.worker.messages import CriticForward, CriticForwardResult, CriticTrain, TrainResult
from asyppo_async.types import Float32Array, Prompt, TokenSequences, concatenate_sequences


class Critic(Protocol):
    """A critic group, as a step sees it."""

    async def forward(self, request: CriticForward) -> CriticForwardResult: ...

    async def train(self, request: CriticTrain) -> TrainResult: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticValues:
    """What the critics say about a batch."""

    of_tokens: NDArray[np.float32]
    """[M, N]; M is 0 for a method without critics."""
    of_ends: NDArray[np.float32] | None
    """[M, B] V(s_T) of truncated responses, 0 for the others; only under `truncated = bootstrap`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartValues:
    """V(s_0) of prompts by id, over the critics."""

    means: dict[str, float]
    stds: dict[str, float]
    """Population; 0 for one critic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticPart:
    """What the critics gave for one batch."""

    values_before: NDArray[np.float32] | None
    """[M, N] before their update, where it was needed."""
    values: CriticValues
    """That the advantages are made from."""
    results: tuple[TrainResult, ...]
    """One per critic."""


class CriticSide:
    """M critic groups; every method asks all of them at once."""

    def __init__(self, config: TrainConfig, critics: tuple[Critic, ...]) -> None:
        self._config = config
        self._critics = critics

    async def values(self, batch: Batch, trace: Trace) -> CriticValues:
        """Of every token of the batch, and of the ends if they are bootstrapped."""
        if self._config.algorithm.truncated != "bootstrap":
            return CriticValues(
                of_tokens=await self._forward(batch.sequences, batch.step, trace), of_ends=None
            )
        sequences, extra = with_end_states(batch.sequences, batch.truncated)
        values = await self._forward(sequences, batch.step, trace)
        ends = np.zeros((len(values), len(batch.rewards)), dtype=np.float32)
        ends[:, batch.truncated] = values[:, extra]
        return CriticValues(of_tokens=values[:, ~extra], of_ends=ends)

    async def values_of(self, sequences: TokenSequences, trace: Trace) -> NDArray[np.float32]:
        """[M, N] of responses that are of no batch."""
        return await self._forward(sequences, -1, trace)

    async def start_values(self, prompts: Sequence[Prompt], step: int, trace: Trace) -> StartValues:
        """V(s_0) of prompts by id: the value before a first token, whatever that is."""
        if not prompts:
            return StartValues(means={}, stds={})
        token = np.zeros(1, dtype=np.int32)
        sequences = concatenate_sequences([(prompt.token_ids, token) for prompt in prompts])
        values = await self._forward(sequences, step, trace, phase="critic_scoring")
        ids = [prompt.id for prompt in prompts]
        return StartValues(
            means=dict(zip(ids, values.mean(axis=0).tolist(), strict=True)),
            stds=dict(zip(ids, values.std(axis=0).tolist(), strict=True)),
        )

    async def train(
        self, batch: Batch, trace: Trace, values: NDArray[np.float32] | None, trained: NDArray[np.bool_]
    ) -> tuple[TrainResult, ...]:
        """Each critic on its share; `values` [M, N] from before, where they are read."""
        config = self._config
        if values is None:
            values = np.zeros((len(self._critics), batch.sequences.num_response_tokens), dtype=np.float32)
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

    async def _forward(
        self, sequences: TokenSequences, step: int, trace: Trace, phase: str = "critic_forward"
    ) -> NDArray[np.float32]:
        request = CriticForward(sequences=sequences)

        async def of(critic: Critic) -> Float32Array:
            with trace.span(phase, step):
                return (await critic.forward(request)).values

        async with asyncio.TaskGroup() as tasks:
            values = [tasks.create_task(of(critic)) for critic in self._critics]
        empty = np.zeros((0, sequences.num_response_tokens), dtype=np.float32)
        return np.concatenate([empty, *(value.result()[None] for value in values)])
