"""R3: the trainer's mixture-of-experts forward uses the experts that the engine used (routing replay,
2510.11370).

Only the choice of experts is replayed; the gate weights are recomputed from the trainer's own router logits
on those experts, so the router still learns. The engine reports routing for every position it fed: the prompt
and all response tokens but the last, which it sampled and never read. Routing belongs to the version that
generated the token.

Legend: `S` fed positions of a sequence, `N` packed positions, `L` MoE layers, `K` experts per token, `E`
experts.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRouting:
    """The experts of one sequence."""

    experts: Tensor
    """[S, L, K] int16."""

    def __post_init__(self) -> None:
        if self.experts.dim() != 3 or self.experts.is_floating_point():
            raise ValueError(
                f"routing is [positions, layers, experts per token] of integers, got {list(self.experts.shape)} "
                f"{self.experts.dtype}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRouting:
    """The experts of a micro-batch as the trainer forwards it."""

    experts: Tensor
    """[N, L, K] int64."""
    replayed: Tensor
    """[N] bool; false where the engine fed nothing and the trainer's router decides."""


def pack_routing(routings: Sequence[ExpertRouting], sequence_lengths: Sequence[int]) -> PackedRouting:
    """Lay routings end to end for sequences of prompt plus response.

    Args:
        routings: one per sequence, with one position less than the sequence.
        sequence_lengths: P + T of each.
    """
    experts, replayed = [], []
    for number, (routing, length) in enumerate(zip(routings, sequence_lengths, strict=True)):
        fed = len(routing.experts)
        if fed != length - 1:
            raise ValueError(
                f"sequence {number} has {length} tokens, so the engine fed {length - 1} positions, but it reported "
                f"routing for {fed}; a prefix-cache hit must return the stored routing"
            )
        unfed = torch.zeros(1, *routing.experts.shape[1:], dtype=torch.int64)
        experts += [routing.experts.long(), unfed]
        replayed.append(torch.arange(length) < fed)
    return PackedRouting(experts=torch.cat(experts), replayed=torch.cat(replayed))


def replayed_gates(
    router_logits: Tensor, experts: Tensor, replayed: Tensor, *, normalise: bool
) -> tuple[Tensor, Tensor]:
    """(gate weights [N, K] with gradient, experts [N, K]) with the engine's choice where there is one.

    Args:
        router_logits: [N, E] of the trainer.
        experts: [N, K].
        replayed: [N] bool.
        normalise: divide the K weights by their sum (`norm_topk_prob`).
    """
    probabilities = torch.softmax(router_logits.float(), dim=-1)
    own = probabilities.topk(experts.shape[1], dim=-1).indices
    chosen = torch.where(replayed.unsqueeze(1), experts, own)
    gates = probabilities.gather(1, chosen)
    if normalise:
        gates = gates / gates.sum(-1, keepdim=True)
    return gates.to(router_logits.dtype), chosen


@contextmanager
def routing_replay(
    routers: Sequence[nn.Module], routing: PackedRouting, *, normalise: bool
) -> Iterator[None]:
    """Within the block the routers choose the engine's experts.

    A router is a module that returns (router logits [N, E], gate weights [N, K], experts [N, K]), as the
    top-k routers of transformers 5 do; its forward hook replaces the last two. The forward inside the block
    must be over exactly the packed positions of `routing`.

    Args:
        routers: L modules in layer order.
        routing: of this micro-batch.
        normalise: as the model does.
    """
    if len(routers) != routing.experts.shape[1]:
        raise ValueError(
            f"routing has {routing.experts.shape[1]} layers but the model {len(routers)} routers"
        )
    with ExitStack() as stack:
        for layer, router in enumerate(routers):
            handle = router.register_forward_hook(_ReplayHook(routing, layer, normalise=normalise))
            stack.callback(handle.remove)
        yield


class _ReplayHook:
    def __init__(self, routing: PackedRouting, layer: int, *, normalise: bool) -> None:
        self._routing, self._layer, self._normalise = routing, layer, normalise

    def __call__(
        self, router: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = outputs[0]
        if len(logits) != len(self._routing.replayed):
            raise ValueError(
                f"routing is of {len(self._routing.replayed)} positions but the forward has {len(logits)}"
            )
        gates, experts = replayed_gates(
            logits, self._routing.experts[:, self._layer], self._routing.replayed, normalise=self._normalise
        )
        return logits, gates, experts
