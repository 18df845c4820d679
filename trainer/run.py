"""One run from its settings to its summary: start the parts, evaluate, train, evaluate, save."""

import asyncio
import secrets
import time
from dataclasses import asdict

from asyppo_async.config.sections import TrainConfig
from asyppo_async.logs import set_up_logging
from asyppo_async.trainer.coordinator.core import DecisionCore
from asyppo_async.trainer.coordinator.decisions import DecisionSettings
from asyppo_async.trainer.coordinator.evaluation import Evaluation, Evaluator, PinnedVersion
from asyppo_async.trainer.coordinator.loop import StepRecord, TrainingLoop, row_of
from asyppo_async.trainer.coordinator.membership import RunIdentity
from asyppo_async.trainer.coordinator.prompt_table import PromptTable
from asyppo_async.trainer.coordinator.rollouts import Rollouts, RolloutSettings
from asyppo_async.trainer.coordinator.sampler import EpochSampler
from asyppo_async.trainer.coordinator.selection import open_selection
from asyppo_async.trainer.coordinator.step import StepRunner
from asyppo_async.trainer.coordinator.waits import LoopLag, Waits, watch
from asyppo_async.trainer.live import Display, StepLine
from asyppo_async.trainer.material import Material, read_material
from asyppo_async.trainer.parts import Parts, open_parts
from asyppo_async.trainer.run_folder import RunFolder
from asyppo_async.trainer.signals import stop_on_signals
from asyppo_async.trainer.summary import Summary
from asyppo_async.types import Group


async def run_training(config: TrainConfig, log_level: str) -> bool:
    """Train as `config` says.

    Returns:
        Whether a signal ended the run before its last step.

    Raises:
        AsyppoError: The run failed (also within a group); its folder holds what was reached, with the reason.
    """
    material = await asyncio.to_thread(read_material, config)
    folder = RunFolder(config)
    display = Display(config.run.num_steps)
    set_up_logging(log_level, folder.logs / "trainer.log", console=not display.is_terminal)
    run = Run(config, material, folder, display)
    task = asyncio.current_task()
    assert task is not None
    outcome, words = "failed", None
    try:
        with stop_on_signals(task) as stop, display.open():
            outcome = "finished" if await run.train(stop) else "interrupted"
    except asyncio.CancelledError:
        outcome = "interrupted"
    except Exception as error:
        words = describe(error)
        raise
    finally:
        run.close(outcome, words)
    return outcome == "interrupted"


def describe(error: BaseException) -> str:
    """The words of an error, or of the errors of a group, each once."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(dict.fromkeys(describe(inner) for inner in error.exceptions))
    return f"{type(error).__name__}: {error}"


class Run:
    """Holds what lives as long as the run."""

    def __init__(self, config: TrainConfig, material: Material, folder: RunFolder, display: Display) -> None:
        self._config = config
        self._material = material
        self._folder = folder
        self._display = display
        self._summary = Summary()
        self._waits = Waits()
        self._lag = LoopLag()
        self._changed = asyncio.Condition()
        self._pinned = PinnedVersion(config.evaluation.hold_s)
        prompt_ids = list(material.train)
        self._table = PromptTable(config.selection)
        self._selection = open_selection(config, prompt_ids, self._table)
        self._core = DecisionCore(
            settings=decision_settings(config),
            sampler=self._selection
            or EpochSampler(prompt_ids=prompt_ids, seed=config.run.seed, num_epochs=None),
            debug=False,
        )

    async def train(self, stop: asyncio.Event) -> bool:
        """Run to the last step, or until `stop`; whether the last step was reached."""
        identity = RunIdentity(run_id=f"{self._config.run.name}-{secrets.token_hex(4)}", incarnation=0)
        async with open_parts(
            self._config, self._material, self._folder, identity, self._display.phase
        ) as parts:
            self._core.served(0)
            self._summary.startup_seconds = time.monotonic() - self._summary.started_s
            if parts.publisher.first is not None:
                self._summary.publications.append(parts.publisher.first)
            evaluator = self._evaluator(parts)
            self._display.phase("evaluating before training")
            self._summary.evaluation_start = self._note(await evaluator.evaluate())
            self._display.phase("training")
            training_began_s = time.monotonic()
            try:
                await self._train(parts, evaluator, stop)
            finally:
                self._summary.training_seconds = time.monotonic() - training_began_s
            if self._core.finished:
                self._display.phase("evaluating after training")
                self._summary.evaluation_end = self._note(await evaluator.evaluate())
            self._display.phase("saving the actor")
            await parts.actor.save(self._folder.model)
        return self._core.finished

    def close(self, outcome: str, words: str | None) -> None:
        """Write the summary, of a failed run too, and tell the result."""
        self._folder.write_summary(self._summary.row(self._core, outcome=outcome, error=words))
        start, end = self._summary.evaluation_start, self._summary.evaluation_end
        if start is not None and end is not None:
            self._display.result(
                f"held-out accuracy at temperature 1: {start.accuracy:.1%} before, {end.accuracy:.1%} after "
                f"({end.samples} samples each)"
            )
        self._display.result(f"{outcome} after {self._summary.steps} steps; run folder {self._folder.path}")

    async def _train(self, parts: Parts, evaluator: Evaluator, stop: asyncio.Event) -> None:
        config = self._config
        rollouts = Rollouts(
            core=self._core,
            prompts=self._material.train,
            generator=parts.fleet,
            rewards=parts.rewards,
            decode=self._material.decode,
            settings=RolloutSettings(
                group_size=config.batch.group_size,
                sampling=self._material.sampling,
                group_deadline_s=config.fleet.group_deadline_s,
                filter_groups=config.selection.group_filter == "replace",
            ),
            on_group=self._on_group,
            changed=self._changed,
            waits=self._waits,
        )
        loop = TrainingLoop(
            config=config,
            core=self._core,
            rollouts=rollouts,
            runner=StepRunner(config, parts.actor, parts.critics, self._table),
            publisher=parts.publisher,
            pinned=self._pinned,
            evaluate=evaluator.evaluate,
            on_step=self._on_step,
            on_evaluation=lambda evaluation: self._display.phase(_evaluation_line(self._note(evaluation))),
            changed=self._changed,
            waits=self._waits,
            lag=self._lag,
            selection=self._selection,
        )
        watching = watch(
            self._waits,
            self._lag,
            stall_after_s=config.run.stall_after_s,
            fail_after_s=config.run.fail_after_s,
        )
        self._waits.progress()
        async with asyncio.TaskGroup() as tasks:
            losses = [parts.actor.watch(), *(critic.watch() for critic in parts.critics)]
            background = [tasks.create_task(part) for part in (rollouts.run(), watching, *losses)]
            await loop.run(stop)
            for task in background:
                task.cancel()

    def _on_group(self, group: Group) -> None:
        if self._selection is not None and self._config.selection.count_dropped:
            self._selection.record(group)

    def _evaluator(self, parts: Parts) -> Evaluator:
        return Evaluator(
            prompts=self._material.heldout,
            generator=parts.fleet,
            rewards=parts.rewards,
            decode=self._material.decode,
            sampling=self._material.sampling,
            settings=self._config.evaluation,
            deadline_s=self._config.fleet.group_deadline_s,
            pinned=self._pinned,
            waits=self._waits,
        )

    def _note(self, evaluation: Evaluation) -> Evaluation:
        self._folder.append_evaluation(asdict(evaluation))
        return evaluation

    def _on_step(self, record: StepRecord) -> None:
        self._summary.add_step(record)
        self._folder.append_step(row_of(record))
        metrics = record.metrics
        self._display.step(
            StepLine(
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
        )


def decision_settings(config: TrainConfig) -> DecisionSettings:
    """What the decision core reads of the configuration."""
    staleness = config.staleness
    return DecisionSettings(
        batch_size=config.batch.prompts,
        group_size=config.batch.group_size,
        num_critics=config.critic.count,
        max_staleness=staleness.max_staleness,
        on_stale=staleness.on_stale,
        lead=staleness.lead,
        max_attempts=staleness.max_attempts,
        max_concurrent_groups=staleness.max_concurrent_groups,
        max_replacements_per_step=staleness.max_replacements_per_step,
        num_steps=config.run.num_steps,
    )


def _evaluation_line(evaluation: Evaluation) -> str:
    return (
        f"held-out accuracy of version {evaluation.version}: {evaluation.accuracy:.1%} +- "
        f"{evaluation.accuracy_standard_error:.1%} ({evaluation.samples} samples)"
    )
