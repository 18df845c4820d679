"""One training step with everything that it measured, and as a line of metrics.jsonl."""

from dataclasses import asdict, dataclass

from asyppo_async.metrics import Metrics
from asyppo_async.trainer.coordinator.cut import Cut
from asyppo_async.trainer.coordinator.decisions import StepReport
from asyppo_async.trainer.coordinator.publication import Publication
from asyppo_async.trainer.coordinator.report import step_histograms
from asyppo_async.trainer.coordinator.step import StepResult
from asyppo_async.trainer.coordinator.trace import Trace
from asyppo_async.trainer.run_folder import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One training step, for the run folder and the display."""

    version: int
    """After the step."""
    seconds: float
    """From the request for the batch to the end of the publication."""
    waited_s: float
    result: StepResult
    report: StepReport
    publication: Publication | None
    metrics: Metrics
    trace: Trace
    cut: Cut | None = None
    """To be saved, as of the end of the step."""


def row_of(record: StepRecord) -> Row:
    """The line of metrics.jsonl."""
    return {
        "version": record.version,
        **record.metrics,
        **step_histograms(record.result),
        "trace_began_unix_s": record.trace.began_unix_s,
        "trace": [asdict(span) for span in record.trace.spans],
    }
