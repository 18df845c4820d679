"""Which tensors of its checkpoint a loaded model holds, and where in its parameters.

transformers fuses what checkpoints and engines name apart: the experts of a mixture become two parameters a layer. It
can undo that on copies (`revert_weight_conversion`, which its saving uses); here that is done once, on positions
instead of weights, so that every tensor of the checkpoint is a view into a parameter from then on.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from asyppo_async.errors import ConfigError
from asyppo_async.weights.manifest import Manifest, TensorSpec, leaf_module

_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a tensor lies in a contiguous parameter, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    def view(self, parameter: Tensor) -> Tensor:
        parameter = parameter.contiguous()
        return parameter.as_strided(self.shape, self.strides, parameter.storage_offset() + self.start)


class CheckpointNames:
    """Of a model that transformers has loaded and that no training engine has partitioned yet."""

    def __init__(self, module: nn.Module) -> None:
        """Raises:
        ConfigError: a tensor of the checkpoint is no view into a parameter.
        """
        self.num_parameters = sum(parameter.numel() for parameter in module.parameters())
        self._parameters: dict[str, str] = {}
        self._places: dict[str, _Place] = {}
        known: dict[tuple[str, torch.Size], list[_Place]] = {}
        for name, parameter in module.named_parameters():
            # Layers are alike: their names differ in numbers only, and numbers do not choose a conversion.
            kind = (re.sub(r"\d+", "*", name), parameter.shape)
            probe = torch.empty_like(parameter, device="meta")
            split = _as_in_checkpoint(module, name, probe)
            if kind not in known:
                only_renamed = [id(tensor) for tensor in split.values()] == [id(probe)]
                known[kind] = [_whole(probe)] if only_renamed else _places(module, name, parameter.shape)
            for checkpoint_name, place in zip(split, known[kind], strict=True):
                self._parameters[checkpoint_name] = name
                self._places[checkpoint_name] = place

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of every tensor, by its name in the checkpoint."""
        return {name: place.shape for name, place in self._places.items()}

    def together(self, manifest: Manifest) -> Manifest:
        """The same tensors, those of one parameter side by side within each leaf module of the engine.

        A parameter is gathered as a whole, so this order gathers it once.
        """
        ordered: list[TensorSpec] = []
        for _, tensors in groupby(manifest.tensors, key=lambda spec: leaf_module(spec.name)):
            by_parameter: dict[str, list[TensorSpec]] = {}
            for spec in tensors:
                by_parameter.setdefault(self._parameters[spec.name], []).append(spec)
            ordered += chain.from_iterable(by_parameter.values())
        return Manifest(tensors=tuple(ordered))

    def parameters(self, names: Sequence[str]) -> list[str]:
        """Those that hold the tensors with these checkpoint names, in turn: what `tensors` is to be given."""
        return [parameter for parameter, _ in groupby(names, key=self._parameters.__getitem__)]

    def tensors(
        self, names: Sequence[str], parameters: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors with these checkpoint names, in this order, as views of `parameters`, which are full."""
        runs = groupby(names, key=self._parameters.__getitem__)
        for (_, run), (_, parameter) in zip(runs, parameters, strict=True):
            for name in run:
                yield name, self._places[name].view(parameter)


def _as_in_checkpoint(module: nn.Module, name: str, parameter: Tensor) -> dict[str, Tensor]:
    split: dict[str, Tensor] = revert_weight_conversion(module, {name: parameter})
    return split


def _whole(parameter: Tensor) -> _Place:
    strides = torch.empty(parameter.shape, device="meta").stride()
    return _Place(shape=tuple(parameter.shape), strides=strides, start=0)


def _places(module: nn.Module, name: str, shape: torch.Size) -> list[_Place]:
    dtype = torch.int32 if shape.numel() <= _MAX_INT32 else torch.int64
    positions = torch.arange(shape.numel(), dtype=dtype).view(shape)
    found = _as_in_checkpoint(module, name, positions)
    return [_place_of(tensor, positions, checkpoint_name) for checkpoint_name, tensor in found.items()]


def _place_of(found: Tensor, positions: Tensor, name: str) -> _Place:
    start = int(found.reshape(-1)[0])
    strides = tuple(
        int(found.select(dim, 1).reshape(-1)[0]) - start if size > 1 else 0
        for dim, size in enumerate(found.shape)
    )
    place = _Place(shape=tuple(found.shape), strides=strides, start=start)
    last = start + sum((size - 1) * stride for size, stride in zip(found.shape, strides, strict=True))
    fits = min(strides, default=0) >= 0 and last < positions.numel()
    if not (fits and torch.equal(place.view(positions), found)):
        raise ConfigError(
            f"{name} cannot be published: transformers does more than cut it out of a parameter of the loaded model"
        )
    return place
