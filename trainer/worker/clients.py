"""The groups as the training step sees them: one awaitable method per request."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from asyppo_async.trainer.worker.codec import Message, expect
from asyppo_async.trainer.worker.group_state import GroupState
from asyppo_async.trainer.worker.messages import (
    ActorForward,
    ActorForwardResult,
    ActorTrain,
    CriticForward,
    CriticForwardResult,
    CriticTrain,
    Save,
    TrainResult,
)
from asyppo_async.trainer.worker.ranks import Ranks
from asyppo_async.trainer.worker.session_messages import (
    CloseSession,
    JoinSession,
    OpenSession,
    SendResult,
    SendWeights,
    SessionStore,
)
from asyppo_async.trainer.worker.sharding import Shard, cut_actor_train, cut_batch, cut_critic_train, merge
from asyppo_async.types import Float32Array
from asyppo_async.weights.manifest import Manifest

_REPLY_MARGIN_S = 5.0
"""What a rank enforces itself it may report this much later, before it counts as lost."""


class ActorGroup:
    """The actor. Requests are answered one after the other; every method raises `WorkerError` when a rank is lost."""

    def __init__(self, ranks: Ranks, manifest: Manifest, request_timeout_s: float) -> None:
        self._ranks = ranks
        self._manifest = manifest
        self._request_timeout_s = request_timeout_s
        self.state = GroupState("actor", ranks, request_timeout_s)

    @property
    def labels(self) -> tuple[str, ...]:
        """Role, rank, process and host of each rank, for messages."""
        return self._ranks.labels

    async def watch(self) -> None:
        """Wait until a rank is lost, then raise `WorkerError`: for a task beside everything else."""
        await self._ranks.watch()

    async def forward(self, request: ActorForward) -> ActorForwardResult:
        """Log-probs and entropies in the order of the request's tokens."""
        shards = await asyncio.to_thread(cut_batch, request.sequences, self._ranks.size)
        requests = [
            replace(
                request,
                sequences=shard.sequences,
                routed_experts=shard.select_routing(request.sequences, request.routed_experts),
            )
            for shard in shards
        ]
        replies = await self._ranks.ask(requests, self._request_timeout_s)
        results = [expect(reply, ActorForwardResult) for reply in replies]
        if len(results) == 1:
            return results[0]
        num_tokens = request.sequences.num_response_tokens
        return ActorForwardResult(
            logprobs=merge(shards, [result.logprobs for result in results], num_tokens),
            entropies=merge(shards, [result.entropies for result in results], num_tokens),
            reference_logprobs=_merged_reference(shards, results, num_tokens),
            compute_s=max(result.compute_s for result in results),
        )

    async def train(self, request: ActorTrain) -> TrainResult:
        """All optimizer steps of one training step.

        Raises:
            TrainingDiverged: more steps than the budget allows were not finite.
        """
        requests = await asyncio.to_thread(cut_actor_train, request, self._ranks.size)
        return await _train(self._ranks, requests, self._request_timeout_s)

    async def save(self, folder: Path, *, adapter: bool = False) -> None:
        """Write the policy in Hugging Face format, with its tokenizer; the folder must not exist yet.

        `adapter`: only its adapters, as peft's folder.
        """
        requests = [Save(folder=_new_folder(folder), adapter=adapter)] * self._ranks.size
        await self._ranks.ask(requests, self._request_timeout_s)

    async def manifest(self) -> Manifest:
        """What a publication carries, in the order of the wire."""
        return self._manifest

    async def open_session(
        self,
        host: str,
        epoch: int,
        world_size: int,
        backend: Literal["gloo", "nccl"],
        deadline_s: float,
    ) -> SessionStore:
        """Open a weight session at rank 0; an earlier one is closed.

        Args:
            host: address of the coordinator's machine; the store listens there unless rank 0 is on another one.
            epoch: of the session.
            world_size: rank 0 and the servers' workers.
            backend: what carries the bytes.
            deadline_s: of the store.
        """
        request = OpenSession(
            host=self._ranks.first_elsewhere or host,
            epoch=epoch,
            world_size=world_size,
            backend=backend,
            deadline_s=deadline_s,
        )
        replies = await self._ranks.ask([request], deadline_s + _REPLY_MARGIN_S)
        return expect(replies[0], SessionStore)

    async def join_session(self, epoch: int, deadline_s: float) -> None:
        """Meet the servers' workers at the open session's store.

        Raises:
            WeightSyncError: not all arrived in time.
        """
        await self._ranks.ask([JoinSession(epoch=epoch, deadline_s=deadline_s)], deadline_s + _REPLY_MARGIN_S)

    def on_device(self) -> AbstractAsyncContextManager[None]:
        """Within, this group has its device to itself: what is asked of it waits for no other group."""
        return self._ranks.on_device()

    async def send_weights(
        self,
        version: int,
        deadline_s: float,
        *,
        base_version: int = -1,
        keep: bool = False,
        folder: str = "",
    ) -> SendResult:
        """Broadcast the current weights over the session, or write them to a folder; see `SendWeights`.

        Raises:
            WeightSyncError: there is no session, a receiver is gone, or the deadline has passed. The session is of
                no more use; the actor is.
        """
        request = SendWeights(
            version=version, deadline_s=deadline_s, base_version=base_version, keep=keep, folder=folder
        )
        requests = [request] * self._ranks.size
        replies = await self._ranks.ask(requests, deadline_s + _REPLY_MARGIN_S)
        return expect(replies[0], SendResult)

    async def close_session(self) -> None:
        """Leave the weight session, if there is one."""
        await self._ranks.ask([CloseSession()], self._request_timeout_s)


class CriticGroup:
    """One critic; likewise."""

    def __init__(self, ranks: Ranks, request_timeout_s: float, index: int) -> None:
        self._ranks = ranks
        self._request_timeout_s = request_timeout_s
        self.state = GroupState(f"critic-{index}", ranks, request_timeout_s)

    @property
    def labels(self) -> tuple[str, ...]:
        """As the actor's."""
        return self._ranks.labels

    async def watch(self) -> None:
        """Wait until a rank is lost, then raise `WorkerError`."""
        await self._ranks.watch()

    async def forward(self, request: CriticForward) -> CriticForwardResult:
        """Values in the order of the request's tokens."""
        shards = await asyncio.to_thread(cut_batch, request.sequences, self._ranks.size)
        requests = [CriticForward(sequences=shard.sequences) for shard in shards]
        replies = await self._ranks.ask(requests, self._request_timeout_s)
        results = [expect(reply, CriticForwardResult) for reply in replies]
        if len(results) == 1:
            return results[0]
        num_tokens = request.sequences.num_response_tokens
        return CriticForwardResult(
            values=merge(shards, [result.values for result in results], num_tokens),
            compute_s=max(result.compute_s for result in results),
        )

    async def train(self, request: CriticTrain) -> TrainResult:
        """All optimizer steps of one training step; raises `TrainingDiverged` as the actor."""
        requests = await asyncio.to_thread(cut_critic_train, request, self._ranks.size)
        return await _train(self._ranks, requests, self._request_timeout_s)

    async def save(self, folder: Path, *, adapter: bool = False) -> None:
        """Write backbone and value head with their tokenizer; the folder must not exist yet.

        `adapter`: only its adapters, as peft's folder, and the value head.
        """
        requests = [Save(folder=_new_folder(folder), adapter=adapter)] * self._ranks.size
        await self._ranks.ask(requests, self._request_timeout_s)


def _merged_reference(
    shards: list[Shard], results: Sequence[ActorForwardResult], num_tokens: int
) -> Float32Array | None:
    parts = [result.reference_logprobs for result in results if result.reference_logprobs is not None]
    return merge(shards, parts, num_tokens) if len(parts) == len(results) else None


async def _train(ranks: Ranks, requests: Sequence[Message], deadline_s: float) -> TrainResult:
    """Every rank reports the same steps, since what they measure is summed over the ranks."""
    results = [expect(reply, TrainResult) for reply in await ranks.ask(requests, deadline_s)]
    return TrainResult(
        steps=results[0].steps,
        compute_s=max(result.compute_s for result in results),
        activation_bytes=max(result.activation_bytes for result in results),
        peak_bytes=max(result.peak_bytes for result in results),
    )


def _new_folder(folder: Path) -> str:
    if folder.exists():
        raise ValueError(f"{folder} exists; the model is saved to a folder that does not")
    return str(folder.absolute())
