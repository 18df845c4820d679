"""What a rank holds of parameters that it trains whole, as pieces of a training state."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from asyppo_async.trainer.worker.backend.average import Average
from asyppo_async.trainer.worker.backend.optimizer import moments_of
from asyppo_async.trainer.worker.backend.state_files import WEIGHT, Fragment


def state_of(master: Tensor, optimizer: torch.optim.Optimizer, average: Average) -> dict[str, Tensor]:
    """By kind, each of the shape of the master; the optimizer's only once it has begun."""
    return {WEIGHT: master.detach(), **moments_of(optimizer, master), **average.of(master)}


def whole_fragments(
    masters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, average: Average
) -> Iterator[Fragment]:
    """By name."""
    for name, master in masters.items():
        tensors = {kind: values.view(-1) for kind, values in state_of(master, optimizer, average).items()}
        yield Fragment(name=name, shape=tuple(master.shape), start=0, tensors=tensors)
