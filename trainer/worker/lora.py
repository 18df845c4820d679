"""Adapters (LoRA) of one model: which parameters they are, and the weights that model and adapters make together.

An adapted layer W of a checkpoint becomes three parameters: `W.base_layer`, frozen, `lora_A` [r, in] and `lora_B`
[out, r]. What leaves the trainer as a whole model is W + alpha / r B A, under the name that W had.

Legend: `r` the rank.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

FullTensors = Callable[[Sequence[str]], Iterator[tuple[str, Tensor]]]
"""A training engine's way to whole parameters by name; collective."""

_BASE = ".base_layer."
_PARTS = (".lora_A.", ".lora_B.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedLayer:
    """Names of its parameters as they are now."""

    module: str
    """Of the layer within the model, as its checkpoint names it."""
    base: str
    down: str
    """A, [r, in]."""
    up: str
    """B, [out, r]."""

    @property
    def names(self) -> tuple[str, str, str]:
        return self.base, self.down, self.up


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Those of one model; without layers the model trains its own weights, and every method leaves it as it is."""

    layers: Mapping[str, AdaptedLayer]
    """By the name that the parameter of the layer's weight had before."""
    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Ends of names that choose exactly these layers."""
    base_checksum: str
    """Of everything that does not train; empty without layers."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def original_names(self, names: Iterable[str]) -> list[str]:
        """What the parameters with these names were called before there were adapters; those of adapters go."""
        return [_original(name) for name in names if not any(part in name for part in _PARTS)]

    def merged(
        self, full_tensors: FullTensors, names: Sequence[str], *, here: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """The parameters with these original names, in this order, adapters added; one at a time. Collective.

        `here`: somebody looks at them on this rank; elsewhere nothing is computed, and what is yielded is not defined.
        """
        places = [self._present(name) for name in names]
        parts = full_tensors([part for place in places for part in place])
        for name, place in zip(names, places, strict=True):
            tensors = [tensor for _, tensor in islice(parts, len(place))]
            if here and len(tensors) > 1:
                yield name, merged_weight(*tensors, scale=self.scale)
            else:
                yield name, tensors[0]

    def pairs(self, full_tensors: FullTensors, *, scaled: bool) -> Iterator[tuple[str, Tensor]]:
        """A and B of every layer under the names that peft gives them. Collective.

        `scaled`: alpha / r is part of B, in float32, as it is published; peft's folder says it beside them.
        """
        layers = self.layers.values()
        parts = full_tensors([name for layer in layers for name in (layer.down, layer.up)])
        for layer in layers:
            (_, down), (_, up) = islice(parts, 2)
            stem = f"base_model.model.{layer.module}"
            yield f"{stem}.lora_A.weight", down
            yield f"{stem}.lora_B.weight", _exact(up) * self.scale if scaled else up

    def _present(self, name: str) -> tuple[str, ...]:
        """Where the parameter with this original name is now: one, or the three of an adapted layer."""
        layer = self.layers.get(name)
        if layer is not None:
            return layer.names
        stem, _, last = name.rpartition(".")
        if f"{stem}.weight" in self.layers:
            return (f"{stem}{_BASE}{last}",)
        return (name,)


NO_ADAPTERS = Adapters(layers={}, rank=1, alpha=1.0, targets=(), base_checksum="")


def merged_weight(weight: Tensor, down: Tensor, up: Tensor, *, scale: float) -> Tensor:
    """W [out, in] + scale B [out, r] A [r, in], computed in float32 (float64 where W is), in W's type."""
    return torch.addmm(_exact(weight), _exact(up), _exact(down), alpha=scale).to(weight.dtype)


def _exact(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.dtype == torch.float64 else tensor.detach().to(torch.float32)


def _original(name: str) -> str:
    return name.replace(_BASE, ".")
