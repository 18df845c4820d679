"""Deadlines of the legs of a publication, from what they took before."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Leg = Literal["stage", "commit", "probe"]

FACTOR = 3.0
"""A leg may take so many times the slowest that was measured."""
ASSUMED_BYTES_PER_S = 50e6
"""Before anything was measured: a slow network, or a busy host."""


class Pace:
    """Every publication of a run carries the same bytes, so the rate of a leg is its seconds."""

    def __init__(self, min_deadline_s: float, num_bytes: int) -> None:
        self._min_deadline_s = min_deadline_s
        self._assumed_s = num_bytes / ASSUMED_BYTES_PER_S
        self._slowest_s: dict[Leg, float] = {}

    def deadline_s(self, leg: Leg) -> float:
        return max(FACTOR * self._slowest_s.get(leg, self._assumed_s), self._min_deadline_s)

    def measured(self, leg: Leg, seconds: float) -> None:
        self._slowest_s[leg] = max(self._slowest_s.get(leg, 0.0), seconds)

    @contextmanager
    def timed(self, leg: Leg) -> Iterator[None]:
        """Measure the block as this leg; one that fails says nothing about the pace."""
        started_s = time.monotonic()
        yield
        self.measured(leg, time.monotonic() - started_s)
