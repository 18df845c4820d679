"""`summary.json`: what a run came to, added up from what its parts measured."""

import math
import time
from dataclasses import dataclass, field

import torch

from asyppo_async.algorithms.token_classes import TokenClass
from asyppo_async.trainer.coordinator.core import DecisionCore
from asyppo_async.trainer.coordinator.evaluation import Evaluation
from asyppo_async.trainer.coordinator.loop import StepRecord
from asyppo_async.trainer.coordinator.publication import Publication
from asyppo_async.trainer.run_folder import Row


@dataclass(slots=True)
class Summary:
    """Collects over the run; `row` gives the document."""

    started_s: float = field(default_factory=time.monotonic)
    evaluation_start: Evaluation | None = None
    evaluation_end: Evaluation | None = None
    publications: list[Publication] = field(default_factory=list)
    startup_seconds: float = math.nan
    """Until the initial weights had passed their probe."""
    training_seconds: float = math.nan
    steps: int = 0
    step_seconds: float = 0.0
    wait_seconds: float = 0.0
    max_staleness_seen: int = 0

    def add_step(self, record: StepRecord) -> None:
        self.steps += 1
        self.step_seconds += record.seconds
        self.wait_seconds += record.waited_s
        self.max_staleness_seen = max(self.max_staleness_seen, _staleness_with_weight(record))
        if record.publication is not None:
            self.publications.append(record.publication)

    def row(self, core: DecisionCore, *, outcome: str, error: str | None) -> Row:
        """The summary document.

        Args:
            core: For the ledger.
            outcome: finished, interrupted or failed.
            error: The error's words, of a failed run.
        """
        counts, tokens = core.counts(), core.token_counts()
        start, end = self.evaluation_start, self.evaluation_end
        fresh_tokens = sum(publication.sampled.num_tokens for publication in self.publications)
        fresh_gap = sum(
            publication.sampled.mean * publication.sampled.num_tokens for publication in self.publications
        )
        return {
            "outcome": outcome,
            "error": error,
            "accuracy_start": start.accuracy if start else None,
            "accuracy_end": end.accuracy if end else None,
            "accuracy_samples": end.samples if end else (start.samples if start else 0),
            "accuracy_standard_error_start": start.accuracy_standard_error if start else None,
            "accuracy_standard_error_end": end.accuracy_standard_error if end else None,
            "greedy_accuracy_start": start.greedy_accuracy if start else None,
            "greedy_accuracy_end": end.greedy_accuracy if end else None,
            "steps": self.steps,
            "step_seconds_mean": self.step_seconds / self.steps if self.steps else None,
            "wait_seconds_mean": self.wait_seconds / self.steps if self.steps else None,
            "max_staleness_bound": core.settings.max_staleness,
            "max_staleness_seen": self.max_staleness_seen,
            "groups_issued": counts.issued,
            "groups_trained": counts.trained,
            "groups_dropped": counts.dropped,
            "groups_reduced": counts.reduced,
            "groups_unfinished": counts.in_flight + counts.queued + counts.returned,
            "tokens_generated": tokens.generated,
            "tokens_trained": tokens.trained,
            "tokens_stale": tokens.stale,
            "tokens_rejected": tokens.rejected,
            "logprob_gap_fresh_mean": fresh_gap / fresh_tokens if fresh_tokens else None,
            "logprob_gap_fresh_tokens": fresh_tokens,
            "publications": len(self.publications),
            "publication_seconds_mean": sum(publication.total_s for publication in self.publications)
            / len(self.publications)
            if self.publications
            else None,
            "startup_seconds": self.startup_seconds,
            "training_seconds": self.training_seconds,
            "wall_seconds": time.monotonic() - self.started_s,
        }


def _staleness_with_weight(record: StepRecord) -> int:
    """Largest staleness of a token that may enter the policy update."""
    result = record.result
    versions = torch.from_numpy(result.batch.versions)
    trained = result.decisions.classes == int(TokenClass.TRAINED)
    return int(result.batch.step - versions[trained].min()) if bool(trained.any()) else 0
