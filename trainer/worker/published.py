"""What an actor publishes: the tensors of its checkpoint, or of its adapters alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from torch import Tensor

from asyppo_async.errors import ConfigError
from asyppo_async.trainer.worker.backend.protocol import Backend
from asyppo_async.trainer.worker.lora import Adapters
from asyppo_async.trainer.worker.names import CheckpointNames
from asyppo_async.weights.adapter import adapter_differences
from asyppo_async.weights.manifest import Dtype, Manifest, TensorSpec, manifest_of_checkpoint


class Published(Protocol):
    @property
    def manifest(self) -> Manifest:
        """Of the tensors, in the order in which they are sent."""
        ...

    def tensors(self, *, here: bool) -> Iterator[tuple[str, Tensor]]:
        """As they are now, in the order of the manifest, one at a time. Collective.

        `here`: this rank sends them; elsewhere what is yielded is not defined, but all of it must be taken.
        """
        ...


class WholeWeights:
    """The tensors of the checkpoint that the model was loaded from, adapters added where there are any."""

    def __init__(
        self, backend: Backend, names: CheckpointNames, manifest: Manifest, adapters: Adapters
    ) -> None:
        self._backend = backend
        self._names = names
        self._adapters = adapters
        self.manifest = manifest

    def tensors(self, *, here: bool) -> Iterator[tuple[str, Tensor]]:
        names = [spec.name for spec in self.manifest.tensors]
        parameters = self._adapters.merged(
            self._backend.full_tensors, self._names.parameters(names), here=here
        )
        return self._names.tensors(names, parameters) if here else parameters


class AdapterWeights:
    """A and B of every adapted layer, the scale in B."""

    def __init__(self, backend: Backend, adapters: Adapters, manifest: Manifest) -> None:
        self._backend = backend
        self._adapters = adapters
        self.manifest = manifest

    def tensors(self, *, here: bool) -> Iterator[tuple[str, Tensor]]:
        return self._adapters.pairs(self._backend.full_tensors, scaled=here)


def manifest_of_weights(names: CheckpointNames, folder: Path, dtype: Dtype) -> Manifest:
    """The tensors of the checkpoint in `folder`, all of which the loaded model must hold.

    Raises:
        ConfigError: the model holds others, or in other shapes.
    """
    manifest = manifest_of_checkpoint(folder, dtype)
    wanted = {spec.name: spec.shape for spec in manifest.tensors}
    shapes = names.shapes
    if shapes != wanted:
        different = sorted(
            name for name in shapes.keys() | wanted.keys() if shapes.get(name) != wanted.get(name)
        )
        raise ConfigError(
            f"{len(different)} tensors of {folder} are named or shaped otherwise in the loaded model, so they cannot "
            f"be published: {', '.join(different[:3])}"
        )
    return names.together(manifest)


def manifest_of_adapters(adapters: Adapters, shapes: dict[str, tuple[int, ...]], base: Manifest) -> Manifest:
    """The tensors of the adapters, which a server of the model of `base` must be able to serve.

    Args:
        adapters: of the actor.
        shapes: of its parameters, by their names.
        base: of the whole model.

    Raises:
        ConfigError: engines serve no adapter of some layer.
    """
    dtype = base.tensors[0].dtype
    specs = []
    for layer in adapters.layers.values():
        stem = f"base_model.model.{layer.module}"
        for part, name in (("lora_A", layer.down), ("lora_B", layer.up)):
            specs.append(TensorSpec(name=f"{stem}.{part}.weight", shape=shapes[name], dtype=dtype))
    manifest = Manifest(tensors=tuple(specs))
    differences = adapter_differences(manifest, base, adapters.rank)
    if differences:
        raise ConfigError(
            'weights.lora = "adapter": servers take no adapter of some layers of actor.lora_targets; leave them out, '
            f'or use weights.lora = "merged": {"; ".join(differences[:3])}'
        )
    return manifest
