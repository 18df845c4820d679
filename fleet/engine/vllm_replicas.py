"""Data-parallel replicas of one server: which one takes a request, and whether all of them hold the same weights."""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from asyppo_async.config.learner import Dtype
from asyppo_async.fleet.engine.protocol import EngineFault
from asyppo_async.types import Float32Array

_AGREE_WITHIN: dict[Dtype, float] = {"float32": 1e-4, "bfloat16": 0.02}
"""Mean gap in nats: rounding of the type, where other requests are in the batch."""


class Replicas:
    """vLLM would balance by counts that are 100 ms old, and let requests wait at a replica while another has room.

    Here each request goes to the replica with the fewest: as long as all together have no more than all slots, none has
    more than its own.
    """

    def __init__(self, number: int) -> None:
        self._running = [0] * number

    @property
    def all(self) -> Sequence[int | None]:
        """What vLLM calls them; None: there is one, and it has no number."""
        return range(len(self._running)) if len(self._running) > 1 else (None,)

    @contextlib.contextmanager
    def place(self) -> Iterator[int | None]:
        """A place at the replica with the fewest requests, as long as the block lasts."""
        index = self._running.index(min(self._running))
        self._running[index] += 1
        try:
            yield self.all[index]
        finally:
            self._running[index] -= 1


def agreed(scores: Sequence[Float32Array], dtype: Dtype) -> Float32Array:
    """Log-probs of one sequence, [replicas][len - 1], as those of one engine.

    Raises:
        EngineFault: the replicas do not compute the same, so they do not hold the same weights.
    """
    for index, other in enumerate(scores[1:], start=1):
        gap = float(np.abs(other - scores[0]).mean())
        if not gap <= _AGREE_WITHIN[dtype]:
            raise EngineFault(
                f"replicas 0 and {index} differ by {gap:.2g} nats on the same {len(other) + 1} tokens; their weights "
                "are not the same"
            )
    return scores[0]
