"""Start and end of every phase of a step, and of what goes on beside it: the proof of what overlapped."""

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One phase; seconds since the trace began, negative for what had begun before."""

    phase: str
    step: int
    """The step whose batch the phase worked on, or that it follows."""
    start_s: float
    end_s: float


class Trace:
    """The spans from the end of one training step to the end of the next, in order of their end."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self.began_unix_s = time.time()
        """By the clock that other processes have too."""
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

    async def during(self, phase: str, step: int, work: Callable[[], Awaitable[None]]) -> None:
        """`span` of work that goes on beside the next steps: it counts to the one in which it ends."""
        with self.span(phase, step):
            await work()

    def take(self) -> "Trace":
        """What there is until now; this one begins anew."""
        taken = Trace()
        taken._began_s, self._began_s = self._began_s, taken._began_s
        taken.began_unix_s, self.began_unix_s = self.began_unix_s, taken.began_unix_s
        taken.spans, self.spans = self.spans, taken.spans
        return taken

    def seconds(self, phase: str) -> float:
        """Time between the first start and the last end of a phase; 0 if it did not happen."""
        spans = [span for span in self.spans if span.phase == phase]
        return max(span.end_s for span in spans) - min(span.start_s for span in spans) if spans else 0.0
