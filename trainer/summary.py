"""`summary.json`: what a run came to, added up from what its parts measured."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from pydantic import ConfigDict, TypeAdapter

from asyppo_async.algorithms.token_classes import TokenClass
from asyppo_async.trainer.coordinator.core import DecisionCore
from asyppo_async.trainer.coordinator.evaluation import Evaluation
from asyppo_async.trainer.coordinator.publication import Publication
from asyppo_async.trainer.coordinator.step_record import StepRecord
from asyppo_async.trainer.run_folder import Row


@dataclass(slots=True, kw_only=True)
class Tally:
    """Sums over the steps behind the present weights, JSON-able: a resumed run goes on with them."""

    __pydantic_config__: ClassVar = ConfigDict(ser_json_inf_nan="constants")

    evaluation_start: Evaluation | None = None
    startup_seconds: float = math.nan
    """Until the first weights of the run, or of its last resume, had passed their probe."""
    training_seconds: float = 0.0
    wall_seconds: float = 0.0
    steps: int = 0
    step_seconds: float = 0.0
    wait_seconds: float = 0.0
    max_staleness_seen: int = 0
    publications: int = 0
    publication_seconds: float = 0.0
    fresh_tokens: int = 0
    fresh_gap: float = 0.0
    """Sum over the fresh tokens of all probes."""
    servers_lost: int = 0
    servers_rejoined: int = 0
    calls_moved: int = 0
    """Whose rest was asked of another server."""
    resumes: int = 0
    """Lives of the run before the present one."""

    def add_step(self, record: StepRecord) -> None:
        self.steps += 1
        self.step_seconds += record.seconds
        self.wait_seconds += record.waited_s
        self.max_staleness_seen = max(self.max_staleness_seen, _staleness_with_weight(record))
        if record.publication is not None:
            self.add_publication(record.publication)

    def add_publication(self, publication: Publication) -> None:
        sampled = publication.sampled
        self.publications += 1
        self.publication_seconds += publication.total_s
        self.fresh_tokens += sampled.num_tokens
        self.fresh_gap += sampled.mean * sampled.num_tokens


def tally_from(text: str) -> Tally:
    """Of a checkpoint."""
    return TypeAdapter(Tally).validate_json(text)


class Summary:
    """Collects over the run; `row` gives the document."""

    def __init__(self, tally: Tally | None = None) -> None:
        """`tally`: of the steps before, in a resumed run."""
        self.tally = tally or Tally()
        self.evaluation_end: Evaluation | None = None
        self.responses_lost: Mapping[str, int] = {}
        """By reason, kept up to date by the rollouts."""
        self.started_s = time.monotonic()
        self._training_began_s: float | None = None

    def training_begins(self) -> None:
        self._training_began_s = time.monotonic()

    def up_to_now(self) -> Tally:
        """The tally, with the time that has passed."""
        now_s = time.monotonic()
        trained_s = 0.0 if self._training_began_s is None else now_s - self._training_began_s
        return replace(
            self.tally,
            training_seconds=self.tally.training_seconds + trained_s,
            wall_seconds=self.tally.wall_seconds + now_s - self.started_s,
        )

    def to_json(self) -> str:
        """For a checkpoint."""
        return TypeAdapter(Tally).dump_json(self.up_to_now()).decode()

    def row(self, core: DecisionCore, *, outcome: str, error: str | None) -> Row:
        """The summary document.

        Args:
            core: For the ledger.
            outcome: finished, interrupted or failed.
            error: The error's words, of a failed run.
        """
        counts, tokens, tally = core.counts(), core.token_counts(), self.up_to_now()
        start, end = tally.evaluation_start, self.evaluation_end
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
            "steps": tally.steps,
            "resumes": tally.resumes,
            "step_seconds_mean": tally.step_seconds / tally.steps if tally.steps else None,
            "wait_seconds_mean": tally.wait_seconds / tally.steps if tally.steps else None,
            "max_staleness_bound": core.settings.max_staleness,
            "max_staleness_seen": tally.max_staleness_seen,
            "groups_issued": counts.issued,
            "groups_trained": counts.trained,
            "groups_dropped": counts.dropped,
            "groups_reduced": counts.reduced,
            "groups_unfinished": counts.in_flight + counts.queued + counts.returned,
            "responses_lost": dict(self.responses_lost),
            "tokens_generated": tokens.generated,
            "tokens_trained": tokens.trained,
            "tokens_stale": tokens.stale,
            "tokens_rejected": tokens.rejected,
            "logprob_gap_fresh_mean": tally.fresh_gap / tally.fresh_tokens if tally.fresh_tokens else None,
            "logprob_gap_fresh_tokens": tally.fresh_tokens,
            "servers_lost": tally.servers_lost,
            "servers_rejoined": tally.servers_rejoined,
            "calls_moved": tally.calls_moved,
            "publications": tally.publications,
            "publication_seconds_mean": tally.publication_seconds / tally.publications
            if tally.publications
            else None,
            "startup_seconds": tally.startup_seconds,
            "training_seconds": tally.training_seconds,
            "wall_seconds": tally.wall_seconds,
        }


def _staleness_with_weight(record: StepRecord) -> int:
    """Largest staleness of a token that may enter the policy update."""
    result = record.result
    versions = torch.from_numpy(result.batch.versions)
    trained = result.decisions.classes == int(TokenClass.TRAINED)
    return int(result.batch.step - versions[trained].min()) if bool(trained.any()) else 0
