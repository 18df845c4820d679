"""What the arithmetic of a step remembers of the steps before: small, immutable, replaced once a step."""

from dataclasses import dataclass

from asyppo_async.algorithms.confidence import CalibrationError
from asyppo_async.algorithms.trust_masks import EntropyTracker


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Empty before the first step, and for methods that remember nothing."""

    calibration: CalibrationError | None = None
    """Running error of each critic (`value_aggregation = confidence`)."""
    entropy: EntropyTracker | None = None
    """Running group entropy (`group_entropy_scaling`)."""
