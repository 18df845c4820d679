"""The model that a KL penalty holds the policy to, beside the actor on every rank, whole and without gradient.

It is frozen, or follows the moving average of the actor's weights.

Where adapters train, the weights that a run starts from are still there: then they are that model, and nothing is held
twice.

Legend: `N` response tokens of a micro-batch.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyppo_async.algorithms.logprobs import KeptSet, TokenDistribution, token_logprobs_and_entropy
from asyppo_async.errors import ConfigError
from asyppo_async.trainer.worker.control import ComputeDtype
from asyppo_async.trainer.worker.experts import Experts
from asyppo_async.trainer.worker.lora_layers import adapters_off
from asyppo_async.trainer.worker.messages import ActorForward
from asyppo_async.trainer.worker.model import Policy, Scoring, load_policy
from asyppo_async.trainer.worker.packing import MicroBatch
from asyppo_async.types import Float32Array


class Frozen(Protocol):
    """What a KL penalty holds the policy to."""

    @property
    def runs_in_engine(self) -> bool:
        """Its forward is one of the training engine's, and so may be a collective."""
        ...

    def logprobs(self, batch: MicroBatch, request: ActorForward, *, chunk_tokens: int) -> Float32Array:
        """[N] with the sampling and the experts of the request; -inf outside its own kept set."""
        ...


class BaseOfAdapters:
    """The policy without its adapters."""

    runs_in_engine = True

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._experts = Experts(policy)

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch, request: ActorForward, *, chunk_tokens: int) -> Float32Array:
        device = self._policy.head_weight.device
        with self._experts.replaying(request, batch), adapters_off(self._policy.module):
            distribution = self._policy.distribution(
                torch.from_numpy(batch.input_ids).to(device),
                torch.from_numpy(batch.states).to(device),
                torch.from_numpy(batch.token_ids).to(device),
                Scoring(
                    documents=batch.documents,
                    temperature=request.temperature,
                    chunk_tokens=chunk_tokens,
                    kept_set=KeptSet(top_k=request.top_k, top_p=request.top_p),
                ),
            )
        return _as_array(distribution)


class Reference:
    """A model of its own."""

    runs_in_engine = False

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._experts = Experts(policy)
        self.module = policy.module
        self.module.requires_grad_(False)

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch, request: ActorForward, *, chunk_tokens: int) -> Float32Array:
        with self._experts.replaying(request, batch):
            hidden = self._policy.hidden_states(self._tensor(batch.input_ids), batch.documents).flatten(0, 1)
        distribution = token_logprobs_and_entropy(
            hidden[self._tensor(batch.states)],
            self._policy.head_weight,
            self._tensor(batch.token_ids),
            temperature=request.temperature,
            chunk_tokens=chunk_tokens,
            float32_head=self._policy.float32_head,
            kept_set=KeptSet(top_k=request.top_k, top_p=request.top_p),
        )
        return _as_array(distribution)

    @torch.no_grad()
    def become(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take other weights, by name; those that are not given stay."""
        own = dict(self.module.named_parameters())
        for name, weight in weights:
            own[name].copy_(weight)

    def _tensor(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self._policy.head_weight.device)


def load_reference(
    folder: str, dtype: ComputeDtype, device: str, *, vocab_size: int, float32_head: bool = False
) -> Reference | None:
    """The model in `folder` on `device`; None for an empty `folder`.

    Raises:
        ConfigError: there is no model, or one of another vocabulary than the actor's.
    """
    if not folder:
        return None
    policy = load_policy(Path(folder), dtype, float32_head=float32_head)
    if policy.vocab_size != vocab_size:
        raise ConfigError(
            f"actor.reference {folder} has a vocabulary of {policy.vocab_size} and the actor one of {vocab_size}; a KL "
            "needs the same tokens in both"
        )
    policy.module.to(device)
    return Reference(policy)


def _as_array(distribution: TokenDistribution) -> Float32Array:
    logprobs: NDArray[np.float32] = (
        distribution.logprobs.masked_fill(~distribution.inside, -torch.inf).float().cpu().numpy()
    )
    return logprobs
