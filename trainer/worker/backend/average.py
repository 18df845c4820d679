"""The exponential moving average of a model's weights, in float32, cut over the ranks as its masters are.

Each element has its own average, so ranks, stages and engines come to the same bits from the same masters.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from asyppo_async.trainer.worker.backend.state_files import AVERAGE, Fragment
from asyppo_async.trainer.worker.world import World


class Average:
    """Off with a decay of 0: then it holds nothing."""

    def __init__(self, masters: Sequence[Tensor], decay: float) -> None:
        """Starts at the masters, which it keeps looking at."""
        self._decay = decay
        self._masters = list(masters) if decay > 0 else []
        self.values = [master.detach().clone() for master in self._masters]
        """One for each master; none where it is off."""
        self._places = {id(master): index for index, master in enumerate(self._masters)}

    def update(self) -> None:
        """average = decay * average + (1 - decay) * master."""
        if self.values:
            masters = [master.detach() for master in self._masters]
            torch._foreach_lerp_(self.values, masters, 1 - self._decay)

    def start_anew(self) -> None:
        """At the masters as they are."""
        for value, master in zip(self.values, self._masters, strict=True):
            value.copy_(master.detach())

    def of(self, master: Tensor) -> dict[str, Tensor]:
        """As a kind of a training state; empty where it is off."""
        place = self._places.get(id(master))
        return {} if place is None else {AVERAGE: self.values[place]}


def whole_averages(
    fragments: Sequence[Fragment], shapes: Sequence[tuple[str, tuple[int, ...]]], world: World
) -> Iterator[tuple[str, Tensor]]:
    """The whole average of each parameter out of the pieces of all ranks, one at a time. Collective.

    Args:
        fragments: of this rank, with averages; an element is at one rank only.
        shapes: name and shape of every parameter, in the same order at every rank.
        world: of all ranks.
    """
    own = {fragment.name: fragment for fragment in fragments}
    for name, shape in shapes:
        whole = torch.zeros(shape, dtype=torch.float32)
        if name in own:
            piece = own[name].tensors[AVERAGE]
            whole.view(-1)[own[name].start : own[name].start + piece.numel()] = piece
        world.sum_in_place([whole])
        yield name, whole
