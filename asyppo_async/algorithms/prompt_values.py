"""A running value per prompt (SPO 2509.13232), and picking prompts near a target success (PCL 2510.01135).
Torch-free.

    v = alpha / (alpha + beta)        before the update
    alpha <- f alpha + r,   beta <- f beta + (1 - r),   f = clamp(2^(-D / D_half), f_min, f_max),   r in {0, 1}

D is how far the policy has moved since the prompt was last tried.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp2, sqrt


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptValue:
    """Pseudo-counts of one prompt."""

    prompt_id: str
    alpha: float
    beta: float

    @property
    def value(self) -> float:
        return self.alpha / (self.alpha + self.beta)


def forget_factor(divergence: float, *, half_divergence: float, minimum: float, maximum: float) -> float:
    """f: half of what is known is forgotten at D = `half_divergence`."""
    return min(maximum, max(minimum, exp2(-divergence / half_divergence)))


def initial_trials(minimum_factor: float) -> float:
    """N_0 = 1 / (1 - f_min): the weight that the prior of a prompt starts with."""
    if not 0 <= minimum_factor < 1:
        raise ValueError(f"the smallest forget factor lies in [0, 1), got {minimum_factor}")
    return 1.0 / (1.0 - minimum_factor)


class PromptValues:
    """The table of all prompts that have been tried."""

    def __init__(self, values: Iterable[PromptValue] = ()) -> None:
        self._values = {entry.prompt_id: entry for entry in values}

    def start(self, prompt_id: str, *, success_rate: float, trials: float) -> None:
        """Set a prompt from n_0 offline samples: their success rate, weighted as `trials`."""
        self._values[prompt_id] = PromptValue(
            prompt_id=prompt_id, alpha=success_rate * trials, beta=(1 - success_rate) * trials
        )

    def of(self, prompt_id: str) -> PromptValue:
        """The value now, which is what an advantage is taken against."""
        if prompt_id not in self._values:
            raise ValueError(f"prompt {prompt_id!r} has no value yet; start it from offline samples first")
        return self._values[prompt_id]

    def update(self, prompt_id: str, *, reward: float, factor: float) -> None:
        """Forget by `factor`, then add one outcome in [0, 1]."""
        if not 0 <= reward <= 1:
            raise ValueError(f"SPO's rewards lie in [0, 1], got {reward} for prompt {prompt_id!r}")
        old = self.of(prompt_id)
        self._values[prompt_id] = PromptValue(
            prompt_id=prompt_id, alpha=factor * old.alpha + reward, beta=factor * old.beta + 1 - reward
        )

    def copy(self) -> "PromptValues":
        """As of now, whatever is updated later."""
        return PromptValues(self._values.values())

    def snapshot(self) -> tuple[PromptValue, ...]:
        return tuple(self._values[prompt_id] for prompt_id in sorted(self._values))


def spo_weight(
    value: float, *, floor: float, trials: float | None = None, trials_exponent: float = 0.0
) -> float:
    """sqrt(v (1 - v)) + floor: how likely a prompt is drawn, up to a factor; divided by trials^exponent in
    the variant.
    """
    weight = sqrt(value * (1 - value)) + floor
    return weight if trials is None else weight / trials**trials_exponent


def weighted_index(weights: Sequence[float], uniform: float) -> int:
    """Index drawn in proportion to the weights by one number in [0, 1)."""
    target = uniform * sum(weights)
    passed = 0.0
    for index, weight in enumerate(weights):
        passed += weight
        if target < passed:
            return index
    return len(weights) - 1


def closest_to_target(values: Sequence[float], count: int, *, target: float) -> tuple[int, ...]:
    """PCL: indices of the `count` candidates with the smallest |V - target|, ascending; ties to the earlier
    one.

    Args:
        values: predicted mean reward of k * m candidates.
        count: m.
        target: tau, on the scale of the values.
    """
    if count > len(values):
        raise ValueError(f"{count} prompts cannot be picked out of {len(values)} candidates")
    return tuple(sorted(sorted(range(len(values)), key=lambda index: abs(values[index] - target))[:count]))
