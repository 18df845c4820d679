"""What a selecting sampler asks DAPS about a candidate, and how good its answers turned out to be."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field

import torch

from asyppo_async.algorithms.calibration import brier_score, ranking_quality
from asyppo_async.algorithms.daps import (
    DapsDecision,
    DapsSettings,
    Disagreement,
    OutcomeCounts,
    decide,
    success_of,
    summarise,
)
from asyppo_async.config.selection import SelectionSection
from asyppo_async.metrics import Metrics, known
from asyppo_async.trainer.coordinator.choice_protocol import ChoiceState, Considered
from asyppo_async.types import Group


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
    _stds: dict[str, float] = field(default_factory=dict)
    _expected: dict[str, float] = field(default_factory=dict)
    """p of prompts at their newest acceptance, until their group comes back; forgotten over a resume."""
    _judged: list[tuple[float, bool]] = field(default_factory=list)
    """p and verdict of every response since the last `metrics`."""
    _step: int = 0

    def __post_init__(self) -> None:
        self._counts = OutcomeCounts(decay=self.section.decay)

    @property
    def _by_std(self) -> Disagreement:
        section = self.section
        return Disagreement(
            floor=section.floor_by_std, prior=section.prior_by_std, decay=section.decay_by_std
        )

    def note_stds(self, stds: Mapping[str, float]) -> None:
        if self._by_std == Disagreement():
            return
        self._stds.update(stds)
        for prompt_id, std in stds.items():
            self._counts.set_decay(prompt_id, self._by_std.decay_at(self.section.decay, std))

    def consider(self, number: int, prompt_id: str) -> Considered:
        settings = DapsSettings(
            prior_trials=self.section.prior_trials,
            minimum_acceptance=self.section.minimum_acceptance,
            uniform_steps=self.section.uniform_steps,
            ramp_steps=self.section.ramp_steps,
        )
        decision = decide(
            self.seed,
            number,
            self._counts.of(prompt_id),
            self.scores.get(prompt_id, 0.0),
            self._step,
            self._by_std.settings_at(settings, self._stds.get(prompt_id, 0.0)),
        )
        self.decisions.append(decision)
        if decision.accepted:
            self._expected[prompt_id] = decision.success_estimate
        return Considered(
            accepted=decision.accepted,
            acceptance=decision.probability,
            success_estimate=decision.success_estimate,
        )

    def record(self, group: Group) -> None:
        expected = self._expected.pop(group.prompt.id, None)
        if expected is not None:
            self._judged += [(expected, one.reward >= 1) for one in group.trajectories]
        partial = self.section.partial_rewards
        successes = sum(success_of(one.reward, partial) for one in group.trajectories)
        self._counts.add(group.prompt.id, successes=successes, trials=len(group.trajectories))

    def end_step(self, optimizer_steps: int) -> None:
        self._step += optimizer_steps if self.section.schedule_unit == "gradient_step" else 1
        self._counts.advance()

    def metrics(self) -> Metrics:
        summary = summarise(self.decisions)
        self.decisions.clear()
        return self._quality() | {
            "selection/probability_mean": summary.mean_probability,
            "selection/candidates_per_accepted": summary.candidates_per_accepted,
            "selection/accepted_middle_share": summary.accepted_middle_share,
            "selection/accepted_trials_mean": summary.accepted_trials,
            **{
                f"selection/candidates_tenth_{tenth}": float(number)
                for tenth, number in enumerate(summary.success_histogram, 1)
            },
        }

    def _quality(self) -> Metrics:
        """Brier score and AUC of p against the verdicts that have come in."""
        judged, self._judged = self._judged, []
        success = torch.tensor([expected for expected, _ in judged], dtype=torch.float64)
        correct = torch.tensor([verdict for _, verdict in judged], dtype=torch.bool)
        return known(
            {
                "selection/success_brier": brier_score(success, correct),
                "selection/success_auc": ranking_quality(success, correct),
            }
        )

    def frozen(self) -> "DapsChoice":
        other = copy(self)
        other._counts, other._stds = self._counts.copy(), self._stds.copy()
        return other

    def state(self) -> ChoiceState:
        return ChoiceState(outcomes=self._counts.snapshot(), step=self._step, stds=self._stds)

    def restore(self, state: ChoiceState) -> None:
        self._counts = OutcomeCounts(decay=self.section.decay, outcomes=state.outcomes)
        self.note_stds(state.stds)
        self._step = state.step
