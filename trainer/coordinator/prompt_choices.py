"""What a selecting sampler asks about a candidate: SPO, PCL and GRESO; DAPS has a file of its own."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field

from asyppo_async.algorithms.daps import (
    critic_probability,
)
from asyppo_async.algorithms.dynamic_sampling import judge_group
from asyppo_async.algorithms.greso import Greso, GresoProbabilities, GresoSettings
from asyppo_async.algorithms.prompt_values import closest_to_target
from asyppo_async.algorithms.seeded import seeded_uniform
from asyppo_async.config.selection import SelectionSection
from asyppo_async.metrics import Metrics
from asyppo_async.trainer.coordinator.choice_protocol import (
    CandidateOf,
    ChoiceState,
    Considered,
    num_correct,
)
from asyppo_async.trainer.coordinator.prompt_table import PromptTable
from asyppo_async.types import Group

_GRESO_LEAST, _GRESO_MOST = 0.05, 0.95
"""Limits of GRESO's base probabilities."""


@dataclass(slots=True)
class SpoChoice:
    """Draws in proportion to SPO's weights, by accepting in proportion to them."""

    seed: int
    table: PromptTable
    num_scored: int = 0

    def consider(self, number: int, prompt_id: str) -> Considered:
        weight = self.table.weight_of(prompt_id)
        return Considered(
            accepted=seeded_uniform(self.seed, "spo", number) < weight,
            acceptance=weight,
            success_estimate=self.table.value_of(prompt_id),
        )

    def note_stds(self, stds: Mapping[str, float]) -> None:
        pass

    def record(self, group: Group) -> None:
        """The estimator updates the table, in the order of training."""

    def end_step(self, optimizer_steps: int) -> None:
        pass

    def metrics(self) -> Metrics:
        return {}

    def frozen(self) -> "SpoChoice":
        return self

    def state(self) -> ChoiceState:
        """Nothing: the table is kept for itself."""
        return ChoiceState()

    def restore(self, state: ChoiceState) -> None:
        pass


@dataclass(slots=True)
class PclChoice:
    """The prompts nearest to the target out of each block of candidates; a block is decided at its first one."""

    sampler_candidate: CandidateOf
    section: SelectionSection
    scores: Mapping[str, float]
    batch_prompts: int
    num_scored: int
    _block: int = -1
    _taken: frozenset[int] = frozenset()

    def consider(self, number: int, prompt_id: str) -> Considered:
        """Nothing is drawn by lot: within its block a candidate is taken for certain, or not at all."""
        size = self.batch_prompts * self.section.pcl_candidates
        block, place = divmod(number, size)
        if block != self._block:
            prompts = [self.sampler_candidate(block * size + offset) for offset in range(size)]
            values = [self.scores.get(prompt, self.section.pcl_target) for prompt in prompts]
            self._block = block
            self._taken = frozenset(
                closest_to_target(values, self.batch_prompts, target=self.section.pcl_target)
            )
        taken, value = place in self._taken, self.scores.get(prompt_id)
        return Considered(
            accepted=taken,
            acceptance=float(taken),
            success_estimate=None if value is None else critic_probability(value),
        )

    def note_stds(self, stds: Mapping[str, float]) -> None:
        pass

    def record(self, group: Group) -> None:
        pass

    def end_step(self, optimizer_steps: int) -> None:
        pass

    def metrics(self) -> Metrics:
        return {}

    def frozen(self) -> "PclChoice":
        return copy(self)

    def state(self) -> ChoiceState:
        return ChoiceState(block=self._block, taken=tuple(sorted(self._taken)))

    def restore(self, state: ChoiceState) -> None:
        self._block, self._taken = state.block, frozenset(state.taken)


@dataclass(slots=True)
class GresoChoice:
    """Skips prompts that kept being all right or all wrong."""

    seed: int
    section: SelectionSection
    num_prompts: int
    num_scored: int = 0
    _greso: Greso = field(init=False)
    _verdicts: dict[str, int] = field(default_factory=lambda: {"kept": 0, "all_right": 0, "all_wrong": 0})
    _epoch: int = 0

    def __post_init__(self) -> None:
        start = self.section.greso_start
        self._greso = Greso(self._settings, GresoProbabilities(easy=start, hard=start))

    @property
    def _settings(self) -> GresoSettings:
        section = self.section
        return GresoSettings(
            explore_floor=section.greso_floor,
            target_easy=section.greso_target_easy,
            target_hard=section.greso_target_hard,
            probability_step=section.greso_step,
            probability_min=_GRESO_LEAST,
            probability_max=_GRESO_MOST,
        )

    def consider(self, number: int, prompt_id: str) -> Considered:
        self._epoch = number // self.num_prompts
        return Considered(
            accepted=not self._greso.skips(prompt_id, seed=self.seed, draw=number),
            acceptance=1 - self._greso.skip_probability(prompt_id),
            success_estimate=None,
        )

    def note_stds(self, stds: Mapping[str, float]) -> None:
        pass

    def record(self, group: Group) -> None:
        right, size = num_correct(group), len(group.trajectories)
        self._greso.record(group.prompt.id, num_correct=right, group_size=size)
        self._verdicts[judge_group(right, size)] += 1

    def end_step(self, optimizer_steps: int) -> None:
        judged = sum(self._verdicts.values())
        if judged:
            self._greso.end_batch(
                easy_share=self._verdicts["all_right"] / judged,
                hard_share=self._verdicts["all_wrong"] / judged,
                epoch=self._epoch,
            )
        self._verdicts = dict.fromkeys(self._verdicts, 0)

    def metrics(self) -> Metrics:
        probabilities = self._greso.probabilities
        return {
            "selection/greso_easy": probabilities.easy,
            "selection/greso_hard": probabilities.hard,
        }

    def frozen(self) -> "GresoChoice":
        other = copy(self)
        other._greso, other._verdicts = self._greso.copy(), self._verdicts.copy()
        return other

    def state(self) -> ChoiceState:
        return ChoiceState(
            runs=self._greso.snapshot(),
            probabilities=self._greso.probabilities,
            verdicts=self._verdicts,
            epoch=self._epoch,
        )

    def restore(self, state: ChoiceState) -> None:
        if state.probabilities is not None:
            self._greso = Greso(self._settings, state.probabilities, state.runs)
        self._verdicts |= state.verdicts
        self._epoch = state.epoch
