"""Samplers that choose: DAPS, SPO, PCL and GRESO behind the seam of `sampler`.

Candidates are a function of seed and number, so those that come next are known before they are asked for: the loop
has the critics score them once a step (`upcoming`, `score`), and `next_candidate` decides at once with the newest
score. DAPS, SPO and PCL draw uniformly with replacement (an epoch is N candidates considered); GRESO goes by epochs.
"""

from collections.abc import Mapping, Sequence

from asyppo_async.algorithms.daps import draw_candidate
from asyppo_async.config.sections import TrainConfig
from asyppo_async.metrics import Metrics
from asyppo_async.trainer.coordinator.prompt_choices import (
    Choice,
    DapsChoice,
    GresoChoice,
    PclChoice,
    SpoChoice,
)
from asyppo_async.trainer.coordinator.prompt_table import PromptTable
from asyppo_async.trainer.coordinator.sampler import Candidate, EpochSampler
from asyppo_async.types import Group


class SelectingSampler:
    """Candidates with replacement, or by epochs, and a choice among them. Implements `Sampler`."""

    def __init__(
        self,
        *,
        prompt_ids: Sequence[str],
        seed: int,
        choice: Choice,
        by_epochs: bool,
        scores: dict[str, float],
    ) -> None:
        self._epochs = EpochSampler(prompt_ids=prompt_ids, seed=seed, num_epochs=None)
        self._prompt_ids = tuple(prompt_ids)
        self._seed = seed
        self._choice = choice
        self._by_epochs = by_epochs
        self._scores = scores
        self._num_considered = 0

    @property
    def num_prompts(self) -> int:
        return len(self._prompt_ids)

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
        return Candidate(
            prompt_id=prompt_id,
            epoch=number // self.num_prompts,
            accepted=self._choice.accepts(number, prompt_id),
        )

    def candidate(self, number: int) -> str:
        """The prompt of the candidate of that number."""
        if self._by_epochs:
            self._epochs.seek(number)
            return self._epochs.next_candidate().prompt_id
        return self._prompt_ids[draw_candidate(self._seed, number, self.num_prompts)]

    def upcoming(self) -> tuple[str, ...]:
        """The prompts whose V(s_0) is wanted now, each once; empty for a choice without critics."""
        numbers = range(self._num_considered, self._num_considered + self._choice.num_scored)
        return tuple(dict.fromkeys(self.candidate(number) for number in numbers))

    def score(self, start_values: Mapping[str, float]) -> None:
        """V(s_0) of prompts, the mean over critics, as of now."""
        self._scores.update(start_values)

    def record(self, group: Group) -> None:
        self._choice.record(group)

    def end_step(self, optimizer_steps: int) -> None:
        self._choice.end_step(optimizer_steps)

    def metrics(self) -> Metrics:
        """What was decided since the last call."""
        return self._choice.metrics()


def open_selection(
    config: TrainConfig, prompt_ids: Sequence[str], table: PromptTable
) -> SelectingSampler | None:
    """The sampler that the section describes; None: every prompt once an epoch."""
    section, seed = config.selection, config.run.seed
    scores: dict[str, float] = {}
    ahead = config.batch.prompts * section.pcl_candidates
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
        case "pcl":

            def candidate(number: int) -> str:
                return prompt_ids[draw_candidate(seed, number, len(prompt_ids))]

            choice = PclChoice(
                sampler_candidate=candidate,
                section=section,
                scores=scores,
                batch_prompts=config.batch.prompts,
                num_scored=2 * ahead,
            )
    return SelectingSampler(
        prompt_ids=prompt_ids,
        seed=seed,
        choice=choice,
        by_epochs=section.prompts == "greso",
        scores=scores,
    )
