"""The learning rate of a model, by optimizer step."""

import math
from dataclasses import dataclass

from asyppo_async.config.learner import RateCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """A linear rise, then constant, or down along a curve."""

    peak: float
    warmup_steps: int
    final: float | None = None
    """None: constant."""
    curve: RateCurve = "cosine"
    schedule_steps: int = 0
    """Steps until it is at `final`, the rise included."""
    head_peak: float | None = None
    """Of a value head, whose rate follows in proportion; None: `peak`."""

    def __post_init__(self) -> None:
        if self.final is not None and self.schedule_steps <= self.warmup_steps:
            raise ValueError(
                f"the learning rate comes down from step {self.warmup_steps} (the end of its rise) to step "
                f"{self.schedule_steps}: set schedule_steps above learning_rate_warmup_steps"
            )

    def after(self, num_steps: int) -> float:
        """Of the step that follows `num_steps` steps."""
        if num_steps < self.warmup_steps:
            return self.peak * (num_steps + 1) / self.warmup_steps
        if self.final is None:
            return self.peak
        passed = min(1.0, (num_steps - self.warmup_steps) / (self.schedule_steps - self.warmup_steps))
        left = 1 - passed if self.curve == "linear" else (1 + math.cos(math.pi * passed)) / 2
        return self.final + (self.peak - self.final) * left

    @property
    def head_share(self) -> float:
        """The head's learning rate as a share of the others'."""
        return 1.0 if self.head_peak is None else self.head_peak / self.peak
