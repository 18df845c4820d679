"""How many tokens a server has sent, and how fast lately."""

from collections import deque

WINDOW_S = 10.0
_SLOT_S = 0.5


class Traffic:
    """Counts in slots of half a second, so that its memory and the cost of a count do not depend on the load."""

    def __init__(self, now_s: float) -> None:
        self._began_s = now_s
        self._slots: deque[tuple[float, int]] = deque()
        self.num_tokens = 0
        """Since the start."""

    def note(self, num_tokens: int, now_s: float) -> None:
        """So many tokens were sent at `now_s` (monotonic seconds, never falling)."""
        self.num_tokens += num_tokens
        if self._slots and now_s - self._slots[-1][0] < _SLOT_S:
            began_s, count = self._slots[-1]
            self._slots[-1] = (began_s, count + num_tokens)
        else:
            self._slots.append((now_s, num_tokens))
        self._forget(now_s)

    def tokens_per_s(self, now_s: float) -> float:
        """Over the last ten seconds, or since the start where that is less."""
        self._forget(now_s)
        span_s = min(WINDOW_S, now_s - self._began_s)
        return sum(count for _, count in self._slots) / span_s if span_s > 0 else 0.0

    def uptime_s(self, now_s: float) -> float:
        return now_s - self._began_s

    def _forget(self, now_s: float) -> None:
        while self._slots and now_s - self._slots[0][0] > WINDOW_S:
            self._slots.popleft()
