"""What a selecting sampler asks about a candidate: DAPS, SPO, PCL and GRESO, and the verdict on a group."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from asyppo_async.algorithms.daps import (
    DapsDecision,
    DapsSettings,
    OutcomeCounts,
    decide,
    summarise,
)
from asyppo_async.algorithms.dynamic_sampling import judge_group
from asyppo_async.algorithms.greso import Greso, GresoProbabilities, GresoSettings
from asyppo_async.algorithms.prompt_values import closest_to_target
from asyppo_async.algorithms.seeded import seeded_uniform
from asyppo_async.config.selection import SelectionSection
from asyppo_async.metrics import Metrics
from asyppo_async.trainer.coordinator.prompt_table import PromptTable
from asyppo_async.types import Group

_GRESO_LEAST, _GRESO_MOST = 0.05, 0.95
"""Limits of GRESO's base probabilities."""


class Choice(Protocol):
    """What a selecting sampler asks about the candidate of a given number."""

    num_scored: int
    """Candidates ahead whose V(s_0) the choice wants to know."""

    def accepts(self, number: int, prompt_id: str) -> bool: ...

    def record(self, group: Group) -> None:
        """A group came back with its verdicts."""
        ...

    def end_step(self, optimizer_steps: int) -> None:
        """A training step has ended."""
        ...

    def metrics(self) -> Metrics:
        """What was decided since the last call."""
        ...


@dataclass(slots=True)
class DapsChoice:
    """S3AC's. A prompt that was never scored counts as V(s_0) = 0, one half right."""

    seed: int
    section: SelectionSection
    scores: Mapping[str, float]
    num_scored: int
    decisions: list[DapsDecision] = field(default_factory=list)
    """Since the last `metrics`."""
    _counts: OutcomeCounts = field(init=False)
    _step: int = 0

    def __post_init__(self) -> None:
        self._counts = OutcomeCounts(decay=self.section.decay)

    def accepts(self, number: int, prompt_id: str) -> bool:
        decision = decide(
            self.seed,
            number,
            self._counts.of(prompt_id),
            self.scores.get(prompt_id, 0.0),
            self._step,
            DapsSettings(
                prior_trials=self.section.prior_trials,
                minimum_acceptance=self.section.minimum_acceptance,
                uniform_steps=self.section.uniform_steps,
                ramp_steps=self.section.ramp_steps,
            ),
        )
        self.decisions.append(decision)
        return decision.accepted

    def record(self, group: Group) -> None:
        self._counts.add(group.prompt.id, successes=num_correct(group), trials=len(group.trajectories))

    def end_step(self, optimizer_steps: int) -> None:
        self._step += optimizer_steps if self.section.schedule_unit == "gradient_step" else 1
        self._counts.advance()

    def metrics(self) -> Metrics:
        summary = summarise(self.decisions)
        self.decisions.clear()
        return {
            "selection/probability_mean": summary.mean_probability,
            "selection/candidates_per_accepted": summary.candidates_per_accepted,
            "selection/accepted_middle_share": summary.accepted_middle_share,
        }


@dataclass(slots=True)
class SpoChoice:
    """Draws in proportion to SPO's weights, by accepting in proportion to them."""

    seed: int
    table: PromptTable
    num_scored: int = 0

    def accepts(self, number: int, prompt_id: str) -> bool:
        return seeded_uniform(self.seed, "spo", number) < self.table.weight_of(prompt_id)

    def record(self, group: Group) -> None:
        """The estimator updates the table, in the order of training."""

    def end_step(self, optimizer_steps: int) -> None:
        pass

    def metrics(self) -> Metrics:
        return {}


@dataclass(slots=True)
class PclChoice:
    """The prompts nearest to the target out of each block of candidates; a block is decided at its first one."""

    sampler_candidate: "CandidateOf"
    section: SelectionSection
    scores: Mapping[str, float]
    batch_prompts: int
    num_scored: int
    _block: int = -1
    _taken: frozenset[int] = frozenset()

    def accepts(self, number: int, prompt_id: str) -> bool:
        size = self.batch_prompts * self.section.pcl_candidates
        block, place = divmod(number, size)
        if block != self._block:
            prompts = [self.sampler_candidate(block * size + offset) for offset in range(size)]
            values = [self.scores.get(prompt, self.section.pcl_target) for prompt in prompts]
            self._block = block
            self._taken = frozenset(
                closest_to_target(values, self.batch_prompts, target=self.section.pcl_target)
            )
        return place in self._taken

    def record(self, group: Group) -> None:
        pass

    def end_step(self, optimizer_steps: int) -> None:
        pass

    def metrics(self) -> Metrics:
        return {}


class CandidateOf(Protocol):
    """The prompt of the candidate of a number."""

    def __call__(self, number: int) -> str: ...


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
        section = self.section
        self._greso = Greso(
            GresoSettings(
                explore_floor=section.greso_floor,
                target_easy=section.greso_target_easy,
                target_hard=section.greso_target_hard,
                probability_step=section.greso_step,
                probability_min=_GRESO_LEAST,
                probability_max=_GRESO_MOST,
            ),
            GresoProbabilities(easy=section.greso_start, hard=section.greso_start),
        )

    def accepts(self, number: int, prompt_id: str) -> bool:
        self._epoch = number // self.num_prompts
        return not self._greso.skips(prompt_id, seed=self.seed, draw=number)

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


def num_correct(group: Group) -> int:
    """Right answers by the binary verdict, not by a shaped reward."""
    return sum(trajectory.reward >= 1 for trajectory in group.trajectories)


def teaches_nothing(group: Group) -> str | None:
    """`all_right` or `all_wrong`, or None for a group whose responses differ."""
    verdict = judge_group(num_correct(group), len(group.trajectories))
    return None if verdict == "kept" else verdict
