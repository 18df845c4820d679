"""Everything that is kept and shown of a run as it goes: run folder, trackers, summary, display."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from asyppo_async.config.sections import TrackingSection
from asyppo_async.errors import AsyppoError
from asyppo_async.trainer.alarms import Alarms
from asyppo_async.trainer.coordinator.core import DecisionCore
from asyppo_async.trainer.coordinator.draws import News
from asyppo_async.trainer.coordinator.evaluation import Evaluation
from asyppo_async.trainer.coordinator.measures.critic_record import critic_record
from asyppo_async.trainer.coordinator.step_record import StepRecord, row_of
from asyppo_async.trainer.live import Display, StepLine
from asyppo_async.trainer.pool.saver import PoolSaver
from asyppo_async.trainer.report.page import write_report
from asyppo_async.trainer.run_folder import Row, RunFolder
from asyppo_async.trainer.samples import sample_rows
from asyppo_async.trainer.summary import Summary, Tally
from asyppo_async.trainer.traces import trace_rows
from asyppo_async.trainer.trackers import Trackers

_log = logging.getLogger(__name__)


class Recorder:
    """Takes what was measured, once, and puts it everywhere. Called from one thread at a time."""

    def __init__(
        self,
        *,
        folder: RunFolder,
        display: Display,
        core: DecisionCore,
        settings: TrackingSection,
        decode: Callable[[Sequence[int]], str],
        tasks: Mapping[str, Row],
        with_candidates: bool,
        pool: PoolSaver | None = None,
        tally: Tally | None = None,
    ) -> None:
        """Args:
        folder: of the run.
        display: of the terminal.
        core: for the ledger in the summary.
        settings: of the run.
        decode: token ids of a response to its text.
        tasks: what the summary says of each task.
        with_candidates: whether the sampler chooses, so that there are candidates to list.
        pool: where responses go for value pretraining.
        tally: of the steps before, in a resumed run.
        """
        self._folder = folder
        self._display = display
        self._core = core
        self._settings = settings
        self._decode = decode
        self._tasks = tasks
        self._with_candidates = with_candidates
        self._pool = pool
        self._alarms = Alarms()
        self.trackers = Trackers(())
        """Set when they have been opened."""
        self.summary = Summary(tally)

    def step(self, record: StepRecord) -> None:
        """A training step with everything that it measured; writes files."""
        self.summary.tally.add_step(record)
        row = {**row_of(record), **critic_record(record.result, self._decode)}
        for words in self._alarms.after(row):
            _log.warning("step %d: %s", record.version, words)
            self._display.result(f"step {record.version}: {words}")
        row["alarms"] = sorted(self._alarms.raised)
        self._folder.append_step(row)
        self._folder.append_samples(
            sample_rows(record.result.batch, self._decode, self._settings.samples_per_step)
        )
        self._folder.append_traces(trace_rows(record.result, self._decode, self._settings.samples_per_step))
        if self._pool is not None:
            self._pool.step(record.result, record.version)
        self.news(record.report.news)
        self.trackers.log(row, record.version)
        self._display.step(_line(record))

    def evaluation(self, evaluation: Evaluation) -> Evaluation:
        row = asdict(evaluation)
        self._folder.append_evaluation(row)
        self.trackers.log(row, evaluation.version, prefix="evaluation/")
        self._display.phase(
            f"held-out accuracy of version {evaluation.version}: {evaluation.accuracy:.1%} +- "
            f"{evaluation.accuracy_standard_error:.1%} ({evaluation.samples} samples)"
        )
        return evaluation

    def close(self, outcome: str, words: str | None) -> None:
        """Write the summary, of a failed run too, and the report, and tell the result."""
        row = self.summary.row(self._core, outcome=outcome, error=words)
        self._folder.write_summary({**row, "tasks": self._tasks})
        if outcome == "finished":
            self.news(self._core.close(time.monotonic()))
        tally, end = self.summary.tally, self.summary.evaluation_end
        start = tally.evaluation_start
        if start is not None and end is not None:
            self._display.result(
                f"held-out accuracy at temperature 1: {start.accuracy:.1%} before, {end.accuracy:.1%} after "
                f"({end.samples} samples each)"
            )
        self._display.result(f"{outcome} after {tally.steps} steps; run folder {self._folder.path}")
        if outcome != "finished" and self._folder.has_checkpoint:
            self._display.result(f"go on with: asyppo-train resume {self._folder.path}")
        if self._settings.report and tally.steps:
            self._report()

    def _report(self) -> None:
        try:
            self._display.result(f"report: {write_report(self._folder.path)}")
        except (AsyppoError, OSError) as error:
            _log.warning("the report was not written: %s; try `asyppo-train report`", error)

    def news(self, news: News) -> None:
        """What became of draws; of a step it comes with the step."""
        self._folder.append_news(news, with_candidates=self._with_candidates)


def _line(record: StepRecord) -> StepLine:
    metrics = record.metrics
    return StepLine(
        step=record.version,
        reward=metrics["reward/mean"],
        accuracy=metrics["reward/accuracy"],
        entropy=metrics.get("actor/entropy", float("nan")),
        staleness=metrics["staleness/mean"],
        tokens_per_s=metrics["batch/tokens"] / record.seconds,
        wait_s=record.waited_s,
        step_s=record.seconds,
        gap=metrics.get("probe/fresh_gap_mean_nats", float("nan")),
    )
