"""One simulated fleet server: continuous batching with a load-dependent speed, versions stamped on every token."""

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from asyppo_async.trainer.coordinator.draws import Draw
from asyppo_async.trainer.coordinator.simulate.scenario import ServerPlan

_ROUNDING = 1e-6


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One response on its way."""

    draw: Draw
    member: int
    length: int
    prompt_tokens: int
    versions: dict[int, int] = field(default_factory=dict)
    """Tokens generated so far, by the version that sampled them."""
    start_work: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(self.versions.values())


class SimServer:
    """All running sequences advance together: `work` counts the tokens that each has got since the start."""

    def __init__(self, plan: ServerPlan) -> None:
        self.plan = plan
        self.version = -1
        self.is_alive = True
        self.is_frozen = False
        self.slowness = 1.0
        self.is_paused = False
        self._running: dict[Sequence, None] = {}
        self._waiting: deque[Sequence] = deque()
        self._ends: list[tuple[float, int, Sequence]] = []
        self._num_started = 0
        self._work = 0.0
        self._last_s = 0.0
        self._prefill_s = 0.0
        """Reading that stands before the next decode iteration."""
        self._read: Draw | None = None
        """The draw whose prompt was read last: its KV is still there."""
        self.occupied_s = 0.0
        """Sequences running, integrated over time."""

    @property
    def load(self) -> float:
        """Sequences per slot."""
        return (len(self._running) + len(self._waiting)) / self.plan.num_slots

    def boot(self) -> None:
        """A new process: it serves nothing until a publication has arrived."""
        self.is_alive = True
        self.is_frozen = self.is_paused = False
        self.slowness = 1.0
        self.version = -1

    def advance(self, now_s: float) -> None:
        """Generate until `now_s` at the speed that held since the last change. Call before every change."""
        elapsed_s = now_s - self._last_s
        rate = self._rate()
        self._last_s = now_s
        self.occupied_s += elapsed_s * len(self._running)
        if rate > 0.0:
            reading_s = min(self._prefill_s, elapsed_s)
            self._prefill_s -= reading_s
            self._work += (elapsed_s - reading_s) * rate

    def next_end_s(self) -> float | None:
        """When the next sequence ends if nothing changes; None: none will."""
        self._forget_ended()
        rate = self._rate()
        if not self._ends or rate == 0.0:
            return None
        return self._last_s + self._prefill_s + max(0.0, self._ends[0][0] - self._work) / rate

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Those that come together share one prompt."""
        self._waiting.extend(sequences)
        self._fill()

    def cancel(self, sequence: Sequence) -> None:
        """Stop it wherever it is; its tokens so far are stamped."""
        if sequence in self._running:
            self._stamp(sequence)
            del self._running[sequence]
            self._fill()
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def take_ended(self) -> list[Sequence]:
        """Sequences that have got their last token."""
        ended: list[Sequence] = []
        while True:
            self._forget_ended()
            if not self._ends or self._ends[0][0] > self._work + _ROUNDING:
                return ended
            sequence = heapq.heappop(self._ends)[2]
            self._add(sequence, sequence.length - sequence.num_tokens)
            del self._running[sequence]
            ended.append(sequence)
            self._fill()

    def commit(self, version: int, *, recompute: bool) -> None:
        """New weights: tokens from here on carry `version`; sequences in flight carry both."""
        for sequence in self._running:
            self._stamp(sequence)
        self.version = version
        if recompute:
            prompts = {sequence.draw: sequence.prompt_tokens for sequence in self._running}
            tokens = sum(prompts.values()) + sum(sequence.num_tokens for sequence in self._running)
            self._prefill_s = tokens * self.plan.prefill_s_per_token

    def clear(self) -> list[Sequence]:
        """Crash or cancellation of everything: what was on it, with the tokens that had arrived."""
        for sequence in self._running:
            self._stamp(sequence)
        lost = [*self._running, *self._waiting]
        self._running.clear()
        self._waiting.clear()
        self._ends.clear()
        self._prefill_s = 0.0
        self._read = None
        return lost

    def _rate(self) -> float:
        """Tokens per second of each running sequence."""
        if not self._running or not self.is_alive or self.is_frozen or self.is_paused:
            return 0.0
        iteration_s = self.plan.base_s + self.plan.per_sequence_s * len(self._running)
        return 1.0 / (iteration_s * self.slowness)

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self.plan.num_slots:
            sequence = self._waiting.popleft()
            context = sequence.num_tokens + (0 if sequence.draw == self._read else sequence.prompt_tokens)
            self._read = sequence.draw
            self._prefill_s += context * self.plan.prefill_s_per_token
            sequence.start_work = self._work
            self._running[sequence] = None
            end = self._work + sequence.length - sequence.num_tokens
            heapq.heappush(self._ends, (end, self._num_started, sequence))
            self._num_started += 1

    def _forget_ended(self) -> None:
        while self._ends and self._ends[0][2] not in self._running:
            heapq.heappop(self._ends)

    def _stamp(self, sequence: Sequence) -> None:
        """Count the whole tokens since the last stamp for the present version."""
        whole = min(int(self._work - sequence.start_work + _ROUNDING), sequence.length - sequence.num_tokens)
        self._add(sequence, whole)
        sequence.start_work += whole

    def _add(self, sequence: Sequence, num_tokens: int) -> None:
        if num_tokens > 0:
            sequence.versions[self.version] = sequence.versions.get(self.version, 0) + num_tokens
