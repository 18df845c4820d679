"""Start and end of every phase of a step: the proof of what overlapped, and the time per phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One phase; seconds since the trace began."""

    phase: str
    step: int
    """The step whose batch the phase worked on."""
    start_s: float
    end_s: float


class Trace:
    """The spans of one training step, in order of their end."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self.spans: list[Span] = []

    @contextmanager
    def span(self, phase: str, step: int) -> Iterator[None]:
        start_s = time.monotonic()
        try:
            yield
        finally:
            self.spans.append(
                Span(
                    phase=phase,
                    step=step,
                    start_s=start_s - self._began_s,
                    end_s=time.monotonic() - self._began_s,
                )
            )

    def seconds(self, phase: str) -> float:
        """Time between the first start and the last end of a phase; 0 if it did not happen."""
        spans = [span for span in self.spans if span.phase == phase]
        return max(span.end_s for span in spans) - min(span.start_s for span in spans) if spans else 0.0
