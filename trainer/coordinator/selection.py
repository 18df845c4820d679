"""Samplers that choose: DAPS, SPO, PCL and GRESO behind the seam of `sampler`.

Candidates are a function of seed and number, so those that come next are known before they are asked for: the loop
has the critics score them once a step (`upcoming`, `score`), and `next_candidate` decides at once with the newest
score. DAPS, SPO and PCL draw uniformly with replacement (an epoch is N candidates considered); GRESO goes by epochs.
Of a mix, each candidate is drawn from the task whose turn it is by weight.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from asyppo_async.algorithms.daps import draw_candidate
from asyppo_async.config.sections import TrainConfig
from asyppo_async.metrics import Metrics
from asyppo_async.trainer.coordinator.choice_protocol import Choice, ChoiceState
from asyppo_async.trainer.coordinator.daps_choice import DapsChoice
from asyppo_async.trainer.coordinator.mixed_sampler import MixedSampler
from asyppo_async.trainer.coordinator.prompt_choices import GresoChoice, PclChoice, SpoChoice
from asyppo_async.trainer.coordinator.prompt_table import PromptTable
from asyppo_async.trainer.coordinator.sampler import Candidate, EpochSampler, Sampler
from asyppo_async.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionState:
    """What a checkpoint keeps of a selecting sampler beside its cursor."""

    scores: dict[str, float]
    choice: ChoiceState


NEVER_SCORED_STEPS = 10**9
NEVER = -NEVER_SCORED_STEPS
"""When a prompt was scored that never was."""


class SelectingSampler:
    """Candidates with replacement, or by epochs, and a choice among them. Implements `Sampler`."""

    def __init__(
        self,
        *,
        num_prompts: int,
        choice: Choice,
        draw: Callable[[int], str],
        scores: dict[str, float],
    ) -> None:
        """`draw`: the prompt of the candidate of a number."""
        self._num_prompts = num_prompts
        self._choice = choice
        self._draw = draw
        self._scores = scores
        self._num_considered = 0
        self._num_steps = 0
        self._scored_at: dict[str, int] = {}
        """Of prompts with a V(s_0): when it was asked for. Empty after a resume, until they are scored again."""
        self._ages: list[int] = []
        """Of V(s_0) at acceptance, in steps, since the last `metrics`."""

    @property
    def num_prompts(self) -> int:
        return self._num_prompts

    @property
    def num_considered(self) -> int:
        return self._num_considered

    @property
    def exhausted(self) -> bool:
        return False

    def seek(self, num_considered: int) -> None:
        self._num_considered = num_considered

    def next_candidate(self) -> Candidate:
        number = self._num_considered
        self._num_considered += 1
        prompt_id = self.candidate(number)
        considered = self._choice.consider(number, prompt_id)
        if considered.accepted and self._choice.num_scored:
            self._ages.append(self._num_steps - self._scored_at.get(prompt_id, NEVER))
        return Candidate(
            number=number,
            prompt_id=prompt_id,
            epoch=number // self.num_prompts,
            accepted=considered.accepted,
            acceptance=considered.acceptance,
            success_estimate=considered.success_estimate,
        )

    def candidate(self, number: int) -> str:
        """The prompt of the candidate of that number."""
        return self._draw(number)

    def upcoming(self) -> tuple[str, ...]:
        """The prompts whose V(s_0) is wanted now, each once; empty for a choice without critics."""
        numbers = range(self._num_considered, self._num_considered + self._choice.num_scored)
        return tuple(dict.fromkeys(self.candidate(number) for number in numbers))

    def score(self, start_values: Mapping[str, float], stds: Mapping[str, float] | None = None) -> None:
        """V(s_0) of prompts as of now: the mean over critics, and their standard deviation where it is known."""
        self._scores.update(start_values)
        self._choice.note_stds(stds or {})
        self._scored_at.update(dict.fromkeys(start_values, self._num_steps))

    def record(self, group: Group) -> None:
        self._choice.record(group)

    def end_step(self, optimizer_steps: int) -> None:
        self._choice.end_step(optimizer_steps)
        self._num_steps += 1

    def metrics(self) -> Metrics:
        """What was decided since the last call."""
        ages, self._ages = self._ages, []
        known = [age for age in ages if age < NEVER_SCORED_STEPS]
        row = {f"selection/start_value_age_{age}": float(known.count(age)) for age in sorted(set(known))}
        if ages:
            row["selection/start_value_unknown_share"] = 1 - len(known) / len(ages)
        if known:
            row["selection/start_value_age_mean_steps"] = sum(known) / len(known)
        return self._choice.metrics() | row

    def freeze(self) -> Callable[[], SelectionState]:
        """Copy what a checkpoint needs, as of now; what is returned makes the state of it, in any thread."""
        scores, choice = self._scores.copy(), self._choice.frozen()
        return lambda: SelectionState(scores=scores, choice=choice.state())

    def restore(self, state: SelectionState) -> None:
        """Go on from what a checkpoint kept."""
        self._scores.clear()  # in place: the choice reads the same mapping
        self._scores.update(state.scores)
        self._choice.restore(state.choice)


def open_selection(
    config: TrainConfig, prompt_ids: Sequence[str], table: PromptTable, mix: MixedSampler | None = None
) -> SelectingSampler | None:
    """The sampler that the section describes; None: every prompt once an epoch.

    Args:
        config: The run's.
        prompt_ids: Of the data set, or of all tasks of a mix.
        table: The running value of each prompt.
        mix: Says the task of each candidate by weight, where there are several.
    """
    section, seed = config.selection, config.run.seed
    scores: dict[str, float] = {}
    ahead = config.batch.prompts * section.pcl_candidates

    def uniform(number: int) -> str:
        ids = prompt_ids if mix is None else mix.share_of(number).prompt_ids
        return ids[draw_candidate(seed, number, len(ids))]

    draw: Callable[[int], str] = uniform
    choice: Choice
    match section.prompts:
        case "epochs":
            return None
        case "daps":
            choice = DapsChoice(seed=seed, section=section, scores=scores, num_scored=ahead)
        case "spo":
            choice = SpoChoice(seed=seed, table=table)
        case "greso":
            choice = GresoChoice(seed=seed, section=section, num_prompts=len(prompt_ids))
            draw = _by_epochs(mix or EpochSampler(prompt_ids=prompt_ids, seed=seed, num_epochs=None))
        case "pcl":
            choice = PclChoice(
                sampler_candidate=uniform,
                section=section,
                scores=scores,
                batch_prompts=config.batch.prompts,
                num_scored=2 * ahead,
            )
    return SelectingSampler(num_prompts=len(prompt_ids), choice=choice, draw=draw, scores=scores)


def _by_epochs(order: Sampler) -> Callable[[int], str]:
    def draw(number: int) -> str:
        order.seek(number)
        return order.next_candidate().prompt_id

    return draw
