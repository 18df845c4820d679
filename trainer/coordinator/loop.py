"""The training loop: batch, step, publication, metrics, again.

rollouts  consumes admissions, produces finished groups, waits for room, unblocked by publications and steps
loop      consumes finished groups, produces versions, waits for due groups, unblocked by rollouts
watch     consumes nothing, produces warnings and `Stalled`
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Protocol

from asyppo_async.config.sections import TrainConfig
from asyppo_async.metrics import Metrics, merge
from asyppo_async.trainer.coordinator.batch import Batch, batch_of
from asyppo_async.trainer.coordinator.core import DecisionCore
from asyppo_async.trainer.coordinator.decisions import StepReport
from asyppo_async.trainer.coordinator.evaluation import Evaluation, PinnedVersion
from asyppo_async.trainer.coordinator.order import Chosen, Waiting
from asyppo_async.trainer.coordinator.publication import Publication
from asyppo_async.trainer.coordinator.report import staleness_of, step_metrics, token_use
from asyppo_async.trainer.coordinator.rollouts import Rollouts
from asyppo_async.trainer.coordinator.selection import SelectingSampler
from asyppo_async.trainer.coordinator.step import StepResult, StepRunner
from asyppo_async.trainer.coordinator.trace import Trace
from asyppo_async.trainer.coordinator.waits import LoopLag, Waits
from asyppo_async.trainer.run_folder import Row


class Publisher(Protocol):
    """The weight session, as the loop sees it."""

    async def publish(self, version: int) -> Publication: ...

    async def set_version(self, version: int) -> None: ...


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


class TrainingLoop:
    """Drives the core through the steps of a run."""

    def __init__(
        self,
        *,
        config: TrainConfig,
        core: DecisionCore,
        rollouts: Rollouts,
        runner: StepRunner,
        publisher: Publisher,
        pinned: PinnedVersion,
        evaluate: Callable[[int], Awaitable[Evaluation]],
        on_step: Callable[[StepRecord], None],
        on_evaluation: Callable[[Evaluation], None],
        changed: asyncio.Condition,
        waits: Waits,
        lag: LoopLag,
        selection: SelectingSampler | None = None,
    ) -> None:
        self._config = config
        self._core = core
        self._rollouts = rollouts
        self._runner = runner
        self._publisher = publisher
        self._pinned = pinned
        self._evaluate = evaluate
        self._on_step = on_step
        self._on_evaluation = on_evaluation
        self._changed = changed
        self._waits = waits
        self._lag = lag
        self._selection = selection
        self._batches: dict[int, Batch] = {}
        """Of the step under way, and of the next one where the critics are ahead."""

    async def run(self, stop: asyncio.Event) -> None:
        """Train until the run is finished or `stop` is set (noticed between two steps and while waiting)."""
        async with asyncio.TaskGroup() as tasks:
            wake = tasks.create_task(self._wake_on(stop))
            evaluation: asyncio.Task[None] | None = None
            while not self._core.finished and not stop.is_set():
                record = await self._step(stop)
                if record is None:
                    break
                self._on_step(record)
                if self._evaluation_is_due(record.version):
                    if evaluation is not None:
                        with self._waits.waiting("loop", "the evaluation before"):
                            await evaluation
                    evaluation = tasks.create_task(self._evaluate_in_passing())
            wake.cancel()

    async def _step(self, stop: asyncio.Event) -> StepRecord | None:
        started_s = time.monotonic()
        batch = await self._next_batch(stop)
        if batch is None:
            return None
        waited_s = time.monotonic() - started_s
        trace = Trace()
        self._core.begin_step(time.monotonic())
        with self._waits.waiting("loop", f"the worker groups, step {batch.step}"):
            result = await self._runner.run(batch, trace, self._batch_ahead)
            await self._inform_selection(result, trace)
        async with self._changed:
            report = self._core.end_step(time.monotonic(), token_use(result))
            self._rollouts.forget(report.fates)
            self._changed.notify_all()
        del self._batches[batch.step]
        self._waits.progress()
        publication = await self._publish(result, trace)
        metrics = await asyncio.to_thread(step_metrics, result, trace)
        seconds = time.monotonic() - started_s
        return StepRecord(
            version=self._core.version,
            seconds=seconds,
            waited_s=waited_s,
            result=result,
            report=report,
            publication=publication,
            metrics=merge([metrics, self._loop_metrics(report, publication, seconds, waited_s, trace)]),
            trace=trace,
        )

    async def _next_batch(self, stop: asyncio.Event) -> Batch | None:
        async with self._changed:
            while not stop.is_set() and not self._core.finished:
                choice = self._core.choose_batch(time.monotonic())
                if isinstance(choice, Chosen):
                    return await self._build(choice)
                await self._wait_for(choice)
        return None

    async def _batch_ahead(self) -> Batch | None:
        async with self._changed:
            while True:
                choice = self._core.choose_ahead(time.monotonic())
                if choice is None:
                    return None
                if isinstance(choice, Chosen):
                    return await self._build(choice)
                await self._wait_for(choice)

    async def _wait_for(self, waiting: Waiting) -> None:
        self._changed.notify_all()  # asking may have given stale groups back: there may be room for admissions
        with self._waits.waiting("loop", str(waiting)):
            await self._changed.wait()

    async def _build(self, chosen: Chosen) -> Batch:
        if chosen.step in self._batches:
            return self._batches[chosen.step]
        groups = self._rollouts.take([draw.draw for draw in chosen.draws])
        self._changed.notify_all()  # the batch left the queue: there may be room for admissions
        batch = await asyncio.to_thread(batch_of, chosen.step, groups, self._config)
        self._batches[chosen.step] = batch
        return batch

    async def _inform_selection(self, result: StepResult, trace: Trace) -> None:
        """Tell the sampler that a step has ended, and score what it will consider next."""
        if self._selection is None:
            return
        steps = () if result.actor is None else result.actor.steps
        if not self._config.selection.count_dropped:
            for group in result.batch.groups:
                self._selection.record(group)
        self._selection.end_step(sum(not step.skipped for step in steps))
        prompts = [self._rollouts.prompt(prompt_id) for prompt_id in self._selection.upcoming()]
        self._selection.score(await self._runner.start_values(prompts, result.batch.step, trace))

    async def _publish(self, result: StepResult, trace: Trace) -> Publication | None:
        """Send the new weights, or only their number where no byte changed."""
        version = self._core.version
        with self._waits.waiting("loop", f"the evaluation that holds publication {version}"):
            await self._pinned.wait()
        changed = result.actor is not None and any(not step.skipped for step in result.actor.steps)
        publication = None
        with (
            self._waits.waiting("loop", f"publication of version {version}"),
            trace.span("publication", result.batch.step),
        ):
            if changed:
                publication = await self._publisher.publish(version)
            else:
                await self._publisher.set_version(version)
        async with self._changed:
            self._core.served(version)
            self._changed.notify_all()
        self._waits.progress()
        return publication

    async def _evaluate_in_passing(self) -> None:
        self._on_evaluation(await self._evaluate(self._config.evaluation.num_prompts))

    def _evaluation_is_due(self, version: int) -> bool:
        every = self._config.evaluation.every_steps
        return every > 0 and version % every == 0 and version < self._config.run.num_steps

    async def _wake_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        async with self._changed:
            self._changed.notify_all()

    def _loop_metrics(
        self,
        report: StepReport,
        publication: Publication | None,
        seconds: float,
        waited_s: float,
        trace: Trace,
    ) -> Metrics:
        counts, tokens = self._core.counts(), self._core.token_counts()
        row = {
            "time/step_s": seconds,
            "time/wait_s": waited_s,
            "time/publication_s": trace.seconds("publication"),
            "loop/lag_max_s": self._lag.take(),
            "queue/groups": float(counts.queued),
            "queue/in_flight_groups": float(counts.in_flight),
            "queue/lead_limit_groups": float(report.lead_limit),
            "ledger/issued": float(counts.issued),
            "ledger/trained": float(counts.trained),
            "ledger/dropped": float(counts.dropped),
            "ledger/filtered": float(counts.filtered),
            "ledger/skipped": float(counts.skipped),
            "ledger/reduced": float(counts.reduced),
            "waste/tokens_generated": float(tokens.generated),
            "waste/tokens_trained": float(tokens.trained),
        }
        if publication is not None:
            row |= publication.metrics()
        if self._selection is not None:
            row |= self._selection.metrics()
        return row


def row_of(record: StepRecord) -> Row:
    """The line of metrics.jsonl."""
    staleness = staleness_of(record.result)
    return {
        "version": record.version,
        **record.metrics,
        "staleness_histogram_tokens": list(map(float, staleness.token_histogram)),
        "staleness_histogram_responses": list(map(float, staleness.sequence_histogram)),
        "trace": [asdict(span) for span in record.trace.spans],
    }
