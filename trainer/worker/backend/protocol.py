"""What a training engine does for an actor or a critic. One implementation per engine, side by side in this folder."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from asyppo_async.trainer.worker.messages import PartNorms


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    grad_norm: float
    """Of the whole gradient, over all ranks, before clipping."""
    learning_rate: float
    parts: PartNorms | None
    """None: the model has no head of its own."""
    applied: bool
    """False: the gradient was not finite, and weights and optimizer are as before."""


class Backend(Protocol):
    """Owns parameters, gradients and optimizer of one model on one rank.

    The caller cuts the batch and divides by global denominators; the gradient of a step is the plain sum of the
    gradients of all `backward` calls of all ranks. `step` and `discard` are collective: every rank calls the same one.
    """

    @property
    def collective(self) -> bool:
        """Forward and backward are collectives: every rank makes the same number of them, idle ones if need be."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        ...

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss` to what this rank has; any number of times, or never, unless `collective`."""
        ...

    def step(self) -> StepOutcome:
        """Sum the gradients over the ranks, clip, update the weights, forget the gradients."""
        ...

    def forget_moments(self) -> None:
        """Let the optimizer start anew; the schedule of the learning rate goes on."""
        ...

    def discard(self) -> None:
        """Forget the gradients without a step."""
        ...

    def full_tensors(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """The full parameters with these names (of `named_parameters`), in this order; adapters are parameters, too.

        Collective: every rank goes through all of it; what the other ranks than 0 see is not defined.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write the model in Hugging Face format from rank 0, adapters added to its weights. Collective."""
        ...

    def save_state(self, folder: Path) -> None:
        """Write what trains, optimizer and schedule into an existing folder. Every rank is called; none waits.

        Raises:
            CheckpointError: It could not be written here; training may go on.
        """
        ...

    def load_state(self, folder: Path, *, average: bool = False) -> None:
        """Become what the ranks saw that wrote this folder, however many they were and whatever engine they had.

        Every rank is called, and waits for nobody. `average`: with the moving average in the place of the weights.

        Raises:
            CheckpointError: It does not fit this model, or cannot be read.
        """
        ...

    def update_average(self) -> None:
        """Have the moving average of the weights follow them by one step; nothing where it is off."""
        ...

    def averages(self) -> Iterator[tuple[str, Tensor]]:
        """The whole average of every trained parameter, by name, on the host or where the parameter is. Collective.

        Every rank goes through all of it, and gets all of it.
        """
        ...

    def to_host(self, *, weights: bool) -> None:
        """Move masters and moments to host memory, and with `weights` the model; nothing else is asked until they are
        back. Between two steps: there are no gradients. Not collective.
        """
        ...

    def to_device(self) -> None:
        """Move back, bit for bit, what `to_host` moved."""
        ...
