"""The running value of each prompt (SPO 2509.13232), shared by the estimator and the sampler of one run.

D, how far the policy has moved since a prompt was last tried, is the sum of the actor's mean KL per training step over
the steps in between: one clock for all prompts instead of a forward on each.
"""

from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from asyppo_async.algorithms.prompt_values import (
    PromptValue,
    PromptValues,
    forget_factor,
    initial_trials,
    spo_weight,
)
from asyppo_async.config.selection import SelectionSection
from asyppo_async.trainer.coordinator.batch import Batch

_START_RATE = 0.5
"""Success rate that a prompt starts with: there are no offline samples in this version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTableState:
    """What a checkpoint keeps of the table."""

    clock: float = 0.0
    values: tuple[PromptValue, ...] = ()
    tried: dict[str, float] = field(default_factory=dict)


class PromptTable:
    """Values, and where the clock stood when each was last updated."""

    def __init__(self, settings: SelectionSection) -> None:
        self._settings = settings
        self._clock = 0.0
        self._values = PromptValues()
        self._tried: dict[str, float] = {}

    def advance(self, divergence: float) -> None:
        """The actor has moved so many nats a token."""
        self._clock += max(0.0, divergence)

    def copy(self) -> Self:
        """As of now, whatever is tried later: quick, so that `state` of it can be made elsewhere."""
        other = type(self)(self._settings)
        other._clock, other._values, other._tried = self._clock, self._values.copy(), self._tried.copy()
        return other

    def state(self) -> PromptTableState:
        return PromptTableState(clock=self._clock, values=self._values.snapshot(), tried=self._tried)

    def restore(self, state: PromptTableState) -> None:
        """Go on from what a checkpoint kept."""
        self._clock, self._values, self._tried = state.clock, PromptValues(state.values), dict(state.tried)

    def value_of(self, prompt_id: str) -> float:
        """Success rate of the prompt as known now."""
        return self._values.of(prompt_id).value if prompt_id in self._tried else _START_RATE

    def weight_of(self, prompt_id: str) -> float:
        """How likely the prompt is drawn, at most 1."""
        floor = self._settings.spo_floor
        return spo_weight(self.value_of(prompt_id), floor=floor) / (0.5 + floor)

    def take(self, batch: Batch) -> NDArray[np.float64]:
        """[B] the value of each response's prompt before it, and the response counted, one after the other."""
        return np.array(
            [
                self._try(trajectory.prompt.id, (trajectory.reward + 1) / 2)
                for group in batch.groups
                for trajectory in group.trajectories
            ],
            dtype=np.float64,
        )

    def _try(self, prompt_id: str, reward: float) -> float:
        settings = self._settings
        if prompt_id not in self._tried:
            self._values.start(
                prompt_id, success_rate=_START_RATE, trials=initial_trials(settings.spo_factor_min)
            )
            self._tried[prompt_id] = self._clock
        prior = self._values.of(prompt_id).value
        factor = forget_factor(
            self._clock - self._tried[prompt_id],
            half_divergence=settings.spo_half_divergence,
            minimum=settings.spo_factor_min,
            maximum=settings.spo_factor_max,
        )
        self._values.update(prompt_id, reward=min(1.0, max(0.0, reward)), factor=factor)
        self._tried[prompt_id] = self._clock
        return prior
