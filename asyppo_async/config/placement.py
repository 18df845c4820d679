"""Where the worker groups compute: each on devices of its own, or in turn on the same ones."""

from typing import Literal

from asyppo_async.config.base import Section

PlacementMode = Literal["split", "colocated"]
Moves = Literal["none", "optimizer", "all"]


class PlacementSection(Section):
    mode: PlacementMode = "split"
    """split: groups compute at the same time, on devices of their own as far as there are enough. colocated: they share
    devices and compute in turn, one group at a time."""
    moves: Moves = "optimizer"
    """What a group that gives up its turn moves to host memory: nothing, masters and moments, or the weights as well
    (the actor's reference model included). Only for `colocated`."""
