"""What `benchmarks/critic_cost.py` measures of one step, and what it says of many."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from asyppo_async.trainer.coordinator.trace import Trace

PHASES = ("actor_forward", "critic_forward", "critic_train", "arithmetic", "actor_train")
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of one step."""

    step_s: float
    cpu_s: float
    """Over all ranks."""
    peak_bytes: int
    """Highest resident bytes of each rank, summed."""
    num_ranks: int
    phases_s: Mapping[str, float]
    """From the first start to the last end of each."""
    rest_s: float
    """In which no phase was under way."""


class Meter:
    """Around one step."""

    def __init__(self, ranks: Mapping[str, psutil.Process]) -> None:
        self.trace = Trace()
        self._ranks = tuple(ranks.values())
        self._started_s = 0.0
        self._cpu_s = 0.0
        self.measured: Measured

    def __enter__(self) -> Self:
        for rank in self._ranks:
            Path(f"/proc/{rank.pid}/clear_refs").write_text("5")  # forgets the highest resident size
        self._cpu_s = self._cpu_seconds()
        self.trace = Trace()
        self._started_s = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None
    ) -> None:
        step_s = time.monotonic() - self._started_s
        self.measured = Measured(
            step_s=step_s,
            cpu_s=self._cpu_seconds() - self._cpu_s,
            peak_bytes=sum(_peak_bytes(rank.pid) for rank in self._ranks),
            num_ranks=len(self._ranks),
            phases_s={phase: self.trace.seconds(phase) for phase in PHASES},
            rest_s=step_s - _covered_s(self.trace),
        )

    def _cpu_seconds(self) -> float:
        return sum(sum(rank.cpu_times()[:2]) for rank in self._ranks)


def _peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _covered_s(trace: Trace) -> float:
    total_s, until_s = 0.0, 0.0
    for span in sorted(trace.spans, key=lambda span: span.start_s):
        total_s += max(0.0, span.end_s - max(span.start_s, until_s))
        until_s = max(until_s, span.end_s)
    return total_s


def line_of(name: str, steps: Sequence[Measured], library_bytes: int) -> str:
    """The best step and what it was made of, and the medians of all."""
    best = min(steps, key=lambda step: step.step_s)
    made_of = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in best.phases_s.items() if seconds)
    return (
        f"{name:28} {best.step_s:6.2f} s (median {statistics.median(step.step_s for step in steps):.2f} s, "
        f"CPU {statistics.median(step.cpu_s for step in steps):.2f} s), "
        f"{memory_bytes(steps, library_bytes) / MIB:.0f} MiB: {made_of}, rest {best.rest_s:.2f}"
    )


def best_s(steps: Sequence[Measured]) -> float:
    """Seconds of the step that was disturbed least."""
    return min(step.step_s for step in steps)


def memory_bytes(steps: Sequence[Measured], library_bytes: int) -> float:
    """Median peak over all ranks above what their libraries hold."""
    return statistics.median(step.peak_bytes - step.num_ranks * library_bytes for step in steps)


def ratios(measured: Mapping[str, Sequence[Measured]], library_bytes: int) -> dict[str, float]:
    """What the benchmark is about."""
    times = {name: best_s(steps) for name, steps in measured.items()}
    memory = {name: memory_bytes(steps, library_bytes) for name, steps in measured.items()}
    schedules = {
        name.removeprefix("AsyPPO "): seconds
        for name, seconds in times.items()
        if name.startswith("AsyPPO") and "one core" not in name
    }
    best = min(schedules, key=schedules.__getitem__)
    own_s, own_bytes = schedules[best], memory[f"AsyPPO {best}"]
    found = {
        "asyppo_over_grpo": own_s / times["GRPO"],
        "asyppo_over_symmetric": own_s / times["symmetric PPO pre"],
        "asyppo_over_symmetric_post": own_s / times["symmetric PPO post"],
        "asyppo_over_symmetric_one_core": times["AsyPPO post, one core"]
        / times["symmetric PPO pre, one core"],
        "memory_over_symmetric": own_bytes / memory["symmetric PPO pre"],
        "memory_over_grpo": own_bytes / memory["GRPO"],
        **{f"{name}_over_grpo": seconds / times["GRPO"] for name, seconds in schedules.items()},
    }
    return {name: round(value, 3) for name, value in found.items()}
