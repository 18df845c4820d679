"""R3 in the actor's forward: which experts the engine used, laid over the rows of a micro-batch.

Legend: `R` rows and `L` columns of a micro-batch, `M` mixture-of-experts layers, `K` experts of a token.
"""

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from asyppo_async.algorithms.routing import ExpertRouting, PackedRouting, pack_routing, routing_replay
from asyppo_async.errors import ConfigError, WorkerError
from asyppo_async.trainer.worker.messages import ActorForward, ActorTrain
from asyppo_async.trainer.worker.model import Policy
from asyppo_async.trainer.worker.packing import MicroBatch, lay_out, ranges
from asyppo_async.types import Int16Array, TokenSequences

_OUTPUTS = 3
"""Of a router: logits, gate weights, experts."""


class Experts:
    """The routers of one policy; a dense one has none."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._routers = routers_of(policy.module)
        # Mixtral's routers have no such switch and always normalise.
        self._normalise = bool(getattr(self._routers[0], "norm_topk_prob", True)) if self._routers else True

    @torch.no_grad()
    def check(self) -> None:
        """Replay the model's own choice and compare: the routers of some families work otherwise.

        Raises:
            ConfigError: the model has no routers, or replay would change it.
        """
        if not self._routers:
            raise ConfigError(
                "actor.routing_replay needs a mixture of experts, and the actor has no routers; set it to false"
            )
        ids = torch.arange(4, device=self._policy.head_weight.device)[None] % self._policy.vocab_size
        chosen: list[Tensor] = []

        def record(router: nn.Module, inputs: tuple[Tensor, ...], outputs: object) -> None:
            if not isinstance(outputs, tuple) or len(outputs) != _OUTPUTS:
                raise ConfigError(
                    f"actor.routing_replay does not know the routers of {type(router).__name__}"
                )
            chosen.append(outputs[2])

        handles = [router.register_forward_hook(record) for router in self._routers]
        try:
            plain = self._policy.hidden_states(ids)
        finally:
            for handle in handles:
                handle.remove()
        own = pack_routing([ExpertRouting(experts=torch.stack(chosen, 1)[:-1])], [ids.shape[1]])
        with routing_replay(self._routers, own, normalise=self._normalise):
            replayed = self._policy.hidden_states(ids)
        gap = float((replayed - plain).abs().max() / plain.abs().max())
        if not gap < 1e-3:
            raise ConfigError(
                f"actor.routing_replay would change this model: replaying its own experts moves its hidden states "
                f"by {gap:.2g}; its routers weigh experts in a way that is not known here"
            )

    def replaying(
        self, request: ActorForward | ActorTrain, batch: MicroBatch
    ) -> AbstractContextManager[None]:
        """Within it the routers choose the engine's experts for this micro-batch, if the request has them."""
        if request.routed_experts is None:
            return nullcontext()
        if not self._routers:
            raise WorkerError("the request says which experts to use, and the actor has none")
        routing = routing_of_rows(request.sequences, request.routed_experts, batch)
        device = self._policy.head_weight.device
        placed = PackedRouting(experts=routing.experts.to(device), replayed=routing.replayed.to(device))
        return routing_replay(self._routers, placed, normalise=self._normalise)


def routers_of(module: nn.Module) -> list[nn.Module]:
    """In the order of the layers; a mixture of transformers' has one for each."""
    return [inner for inner in module.modules() if type(inner).__name__.lower().endswith("topkrouter")]


def routing_of_rows(
    sequences: TokenSequences, routed_experts: Int16Array, batch: MicroBatch
) -> PackedRouting:
    """[R * L] positions; those of padding are left to the trainer's router.

    Args:
        sequences: of the request.
        routed_experts: [sum(P + T - 1), M, K] of the same.
        batch: rows of it.
    """
    inputs = lay_out(sequences).input_lengths
    starts = inputs.cumsum() - inputs
    lengths = inputs[batch.sequences]
    filled = ranges(batch.row_starts, lengths)
    experts = np.zeros((batch.input_ids.size, *routed_experts.shape[1:]), dtype=np.int64)
    experts[filled] = routed_experts[ranges(starts[batch.sequences], lengths)]
    replayed = np.zeros(batch.input_ids.size, dtype=np.bool_)
    replayed[filled] = True
    return PackedRouting(experts=torch.from_numpy(experts), replayed=torch.from_numpy(replayed))
