"""The training loop: batch, step, publication, metrics, again.

rollouts  consumes admissions, produces finished groups, waits for room, unblocked by publications and steps
loop      consumes finished groups, produces versions, waits for due groups, unblocked by rollouts
watch     consumes nothing, produces warnings and `Stalled`
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Protocol

from asyppo_async.concurrency import together
from asyppo_async.config.sections import TrainConfig
from asyppo_async.metrics import Metrics, merge
from asyppo_async.trainer.coordinator.batch import Batch, batch_of
from asyppo_async.trainer.coordinator.core import DecisionCore
from asyppo_async.trainer.coordinator.cut import Cut
from asyppo_async.trainer.coordinator.decisions import StepReport
from asyppo_async.trainer.coordinator.draws import News
from asyppo_async.trainer.coordinator.loop_meter import LoopMeter
from asyppo_async.trainer.coordinator.order import Chosen, Waiting
from asyppo_async.trainer.coordinator.pinning import Pinning
from asyppo_async.trainer.coordinator.publication import Publication
from asyppo_async.trainer.coordinator.report import step_metrics, token_use
from asyppo_async.trainer.coordinator.rollouts import Rollouts
from asyppo_async.trainer.coordinator.saver import Saver
from asyppo_async.trainer.coordinator.selection import SelectingSampler
from asyppo_async.trainer.coordinator.step import StepResult, StepRunner
from asyppo_async.trainer.coordinator.step_record import StepRecord
from asyppo_async.trainer.coordinator.trace import Trace
from asyppo_async.trainer.coordinator.waits import Waits


class Publisher(Protocol):
    """The weight session, as the loop sees it."""

    async def publish(self, version: int) -> Publication: ...

    async def set_version(self, version: int) -> Publication | None:
        """None: no byte was sent, because every server had the weights already."""
        ...


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
        pinning: Pinning,
        before_evaluation: Callable[[], Awaitable[None]],
        evaluate: Callable[[], Coroutine[object, object, None]],
        on_step: Callable[[StepRecord], None],
        changed: asyncio.Condition,
        waits: Waits,
        meter: LoopMeter,
        selection: SelectingSampler | None = None,
        saver: Saver | None = None,
        on_news: Callable[[News], None] = lambda news: None,
    ) -> None:
        """`saver`: None keeps nothing. `on_news`: told what became of draws, where no step ends."""
        self._config = config
        self._core = core
        self._rollouts = rollouts
        self._runner = runner
        self._publisher = publisher
        self._pinning = pinning
        self._before_evaluation = before_evaluation
        self._evaluate = evaluate
        self._on_step = on_step
        self._changed = changed
        self._waits = waits
        self._meter = meter
        self._selection = selection
        self._saver = saver
        self._on_news = on_news
        self._is_due = False
        """A checkpoint is, at the end of the step under way."""
        self._committing: asyncio.Task[None] | None = None
        """Of the checkpoint before."""
        self._batches: dict[int, Batch] = {}
        """Of the step under way, and of the next one where the critics are ahead."""
        self._trace = Trace()

    async def run(self, stop: asyncio.Event) -> None:
        """Train until the run is finished or `stop` is set (noticed between two steps and while waiting).

        With critics ahead `stop` costs one more step: what they have learned belongs to the next one.
        """
        async with asyncio.TaskGroup() as tasks:
            wake = tasks.create_task(self._wake_on(stop))
            evaluation: asyncio.Task[None] | None = None
            while not self._core.finished:
                record = await self._step(stop)
                if record is None:
                    break
                step = record.version - 1
                with self._trace.span("log", step):
                    await asyncio.to_thread(self._on_step, record)
                if record.cut is not None:
                    await self._save(record.cut, tasks)
                if self._evaluation_is_due(record.version):
                    if evaluation is not None:
                        with self._waits.waiting("loop", "the evaluation before"):
                            await evaluation
                    with self._waits.waiting("loop", "the actor, to be kept in case it is the best"):
                        await self._before_evaluation()
                    evaluation = tasks.create_task(self._trace.during("evaluation", step, self._evaluate))
            await self._save_at_end(tasks)
            wake.cancel()

    async def _step(self, stop: asyncio.Event) -> StepRecord | None:
        started_s = time.monotonic()
        batch = await self._next_batch(stop)
        if batch is None:
            return None
        waited_s = time.monotonic() - started_s
        self._pinning.note_wait(waited_s)
        self._is_due = self._saver is not None and self._saver.is_due(batch.step + 1)
        trace = self._trace
        self._core.begin_step(time.monotonic())
        self._meter.begins(batch)
        with self._waits.waiting("loop", f"the worker groups, step {batch.step}"):
            result = await self._runner.run(batch, trace, lambda: self._batch_ahead(stop))
            self._end_step_of_selection(result)
            if self._is_due:
                await self._score(result, trace)  # what a checkpoint keeps of the sampler has it
        async with self._changed:
            report = self._core.end_step(time.monotonic(), token_use(result))
            self._rollouts.forget(report.news.fates)
            cut = self._cut() if self._is_due else None
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
            trace=trace.take(),
            cut=cut,
        )

    async def _next_batch(self, stop: asyncio.Event) -> Batch | None:
        async with self._changed:
            while not self._core.finished and (self._runner.is_ahead or not stop.is_set()):
                choice = self._core.choose_batch(time.monotonic())
                if isinstance(choice, Chosen):
                    return await self._build(choice)
                await self._wait_for(choice)
        return None

    async def _batch_ahead(self, stop: asyncio.Event) -> Batch | None:
        async with self._changed:
            # Where this step ends in a checkpoint, the critics must not have gone past it.
            while not self._is_due and not stop.is_set():
                choice = self._core.choose_ahead(time.monotonic())
                if choice is None:
                    return None
                if isinstance(choice, Chosen):
                    return await self._build(choice)
                await self._wait_for(choice)
        return None

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

    def _end_step_of_selection(self, result: StepResult) -> None:
        """Tell the sampler that a step has ended."""
        if self._selection is None:
            return
        steps = () if result.actor is None else result.actor.steps
        if not self._config.selection.count_dropped:
            for group in result.batch.groups:
                self._selection.record(group)
        self._selection.end_step(sum(not step.skipped for step in steps))

    async def _score(self, result: StepResult, trace: Trace) -> None:
        """Have the critics score what is considered next; nothing is admitted on the new version before."""
        if self._selection is None:
            return
        prompts = [self._rollouts.prompt(prompt_id) for prompt_id in self._selection.upcoming()]
        found = await self._runner.critics.start_values(prompts, result.batch.step, trace)
        self._selection.score(found.means, found.stds)

    async def _publish(self, result: StepResult, trace: Trace) -> Publication | None:
        """Send the new weights, or only their number where no byte changed; candidates are scored meanwhile."""
        version = self._core.version
        with self._waits.waiting("loop", f"the evaluation that holds publication {version}"):
            await self._pinning.before_publication()
        changed = result.actor is not None and any(not step.skipped for step in result.actor.steps)
        send: Callable[[int], Coroutine[None, None, Publication | None]] = (
            self._publisher.publish if changed else self._publisher.set_version
        )
        beside = [] if self._is_due else [self._score(result, trace)]
        with (
            self._waits.waiting("loop", f"publication of version {version}"),
            trace.span("publication", result.batch.step),
        ):
            publication, *_ = await together(send(version), *beside)
        async with self._changed:
            self._core.served(version)
            self._changed.notify_all()
        self._meter.pushed(version)
        self._waits.progress()
        return publication

    def _cut(self) -> Cut:
        """In the turn in which a step has ended, or no step is under way: nothing may happen in between."""
        return Cut(
            core=self._core.state(),
            groups=self._rollouts.finished(),
            begun=self._rollouts.begun(),
            sampling=self._rollouts.sampling,
            memory=self._runner.memory,
            table=self._runner.table.copy(),
            selection=None if self._selection is None else self._selection.freeze(),
            lost_members=dict(self._rollouts.lost_members),
            clock_s=time.monotonic(),
        )

    async def _save(self, cut: Cut, tasks: asyncio.TaskGroup) -> None:
        saver, version = self._saver, cut.core.version
        assert saver is not None
        with self._waits.waiting("loop", f"the groups, which write the checkpoint of version {version}"):
            if self._committing is not None:
                await self._committing
            with self._trace.span("save", version - 1):
                partial = await saver.write(cut)
        if partial is not None:
            self._committing = tasks.create_task(
                self._trace.during("commit", version - 1, lambda: saver.commit(partial, version))
            )
        self._waits.progress()

    async def _save_at_end(self, tasks: asyncio.TaskGroup) -> None:
        """Also of a stopped run, whose finished groups are worth keeping; its last step may be saved already."""
        if self._saver is None or not self._saver.at_end:
            return
        if self._committing is not None:
            await self._committing
        if self._core.finished and self._saver.saved_version == self._core.version:
            return
        async with self._changed:
            news, cut = self._core.take_news(), self._cut()
            self._rollouts.forget(news.fates)
        await asyncio.to_thread(self._on_news, news)
        await self._save(cut, tasks)

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
        row = self._meter.row(report, publication, seconds, waited_s, trace)
        row |= {f"lost/{reason}": float(num) for reason, num in self._rollouts.lost_members.items()}
        if self._selection is not None:
            row |= self._selection.metrics()
        if self._saver is not None:
            row |= self._saver.take_metrics()
        return row
