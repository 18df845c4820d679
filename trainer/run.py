"""One life of a run: start the parts, or restore them, evaluate, train, evaluate, save."""

import asyncio
import time
from dataclasses import dataclass

from asyppo_async.config.sections import TrainConfig
from asyppo_async.trainer.best_model import BestModel
from asyppo_async.trainer.coordinator.batch import truncated_reward
from asyppo_async.trainer.coordinator.checkpoint import CheckpointFolder
from asyppo_async.trainer.coordinator.cut import Restored, crc32_of
from asyppo_async.trainer.coordinator.evaluation import Evaluator
from asyppo_async.trainer.coordinator.loop import TrainingLoop
from asyppo_async.trainer.coordinator.loop_meter import IdleClock, LoopMeter
from asyppo_async.trainer.coordinator.lost_responses import LostResponses
from asyppo_async.trainer.coordinator.membership import RunIdentity
from asyppo_async.trainer.coordinator.mixed_sampler import MixedSampler, open_sampler
from asyppo_async.trainer.coordinator.pinning import Pinning
from asyppo_async.trainer.coordinator.prompt_table import PromptTable
from asyppo_async.trainer.coordinator.rollouts import Rollouts, RolloutSettings
from asyppo_async.trainer.coordinator.saver import Saver
from asyppo_async.trainer.coordinator.selection import open_selection
from asyppo_async.trainer.coordinator.step import StepRunner
from asyppo_async.trainer.coordinator.waits import LoopLag, Waits, watch
from asyppo_async.trainer.critic_folder import critic_name
from asyppo_async.trainer.lineage import has_evaluation
from asyppo_async.trainer.live import Display
from asyppo_async.trainer.material import Material
from asyppo_async.trainer.parts import Parts, open_parts
from asyppo_async.trainer.pool.saver import pool_saver
from asyppo_async.trainer.recorder import Recorder
from asyppo_async.trainer.run_core import begun_samples, open_core, queued_groups
from asyppo_async.trainer.run_folder import RunFolder
from asyppo_async.trainer.servers import Servers
from asyppo_async.trainer.summary import tally_from
from asyppo_async.trainer.trackers import open_trackers
from asyppo_async.trainer.worker.group_state import GroupState, check_folder_is_seen
from asyppo_async.types import Group, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One life of a run: from a start or a resume to its end, or to the death of one of its parts."""

    config: TrainConfig
    material: Material
    folder: RunFolder
    servers: Servers
    display: Display
    identity: RunIdentity
    restored: Restored | None
    """What it goes on from; None: it begins with the initial weights."""


class Run:
    """Holds what lives as long as one life of the run."""

    def __init__(self, life: Life) -> None:
        config, material, restored = life.config, life.material, life.restored
        self._life = life
        self._config = config
        self._material = material
        self._restored = restored
        self._display = life.display
        self._waits = Waits()
        self._lag = LoopLag()
        self._changed = asyncio.Condition()
        self._table = PromptTable(config.selection)
        order = open_sampler(material.shares, config.run.seed)
        mix = order if isinstance(order, MixedSampler) else None
        self._selection = open_selection(config, list(material.train), self._table, mix)
        self._core = open_core(config, self._selection or order, restored)
        if restored is not None:
            self._table.restore(restored.state.table)
            if self._selection is not None and restored.state.selection is not None:
                self._selection.restore(restored.state.selection)
        self._pool = pool_saver(config, material)
        self.recorder = Recorder(
            folder=life.folder,
            display=life.display,
            core=self._core,
            settings=config.tracking,
            decode=material.decode,
            tasks={prompts.spec.known_as: prompts.row() for prompts in material.tasks},
            with_candidates=self._selection is not None,
            pool=self._pool,
            tally=None if restored is None else tally_from(restored.state.tally),
        )
        self.recorder.summary.tally.resumes = life.identity.incarnation

    async def train(self, stop: asyncio.Event) -> bool:
        """Run to the last step, or until `stop`; whether the last step was reached."""
        life, summary = self._life, self.recorder.summary
        version = self._core.version
        with open_trackers(
            self._config, life.folder.path, life.identity.run_id, version
        ) as self.recorder.trackers:
            async with open_parts(
                self._config,
                self._material,
                life.folder,
                life.servers,
                life.identity,
                self._display.phase,
                self._display.result,
                self._restored,
            ) as parts:
                if self._config.checkpoint.is_on:
                    await check_folder_is_seen(life.folder.path, _states(parts))
                self._core.served(version)
                summary.tally.startup_seconds = time.monotonic() - summary.started_s
                if parts.publisher.first is not None:
                    summary.tally.add_publication(parts.publisher.first)
                pinning = Pinning(parts.fleet, self._config.evaluation.hold_s)
                await self._evaluate_and_train(parts, self._evaluator(parts, pinning), pinning, stop)
        return self._core.finished

    async def _evaluate_and_train(
        self, parts: Parts, evaluator: Evaluator, pinning: Pinning, stop: asyncio.Event
    ) -> None:
        summary = self.recorder.summary
        best = BestModel(self._life.folder.path, self._config.evaluation, parts.actor.save)
        if self._restored is not None:
            await best.resume(summary.tally.evaluation_start, self._core.version)
        if summary.tally.evaluation_start is None:
            self._display.phase("evaluating before training")
            summary.tally.evaluation_start = self.recorder.evaluation(await evaluator.evaluate())
            await best.after(summary.tally.evaluation_start)
        elif self._owes_evaluation:
            self._display.phase(f"evaluating version {self._core.version}, which was due when the run died")
            await best.before()
            await best.after(self.recorder.evaluation(await evaluator.evaluate()))
        self._display.phase("training")
        summary.training_begins()
        try:
            await self._train(parts, evaluator, pinning, best, stop)
        finally:
            summary.tally.servers_lost += parts.fleet.num_lost
            summary.tally.servers_rejoined += parts.fleet.num_rejoined
            summary.tally.calls_moved += parts.fleet.num_moves
        if self._core.finished:
            self._display.phase("evaluating after training")
            await best.before()
            summary.evaluation_end = self.recorder.evaluation(await evaluator.evaluate())
            await best.after(summary.evaluation_end)
        self._display.phase("saving actor and critics")
        folder = self._life.folder
        await folder.put(folder.model, parts.actor.save)
        for index, critic in enumerate(parts.critics):
            await folder.put(folder.critics / critic_name(index), critic.save)

    @property
    def _owes_evaluation(self) -> bool:
        """A resumed run begins behind a step after which an evaluation was due, and has none of it."""
        version, every = self._core.version, self._config.evaluation.every_steps
        is_due = every > 0 and version % every == 0 and 0 < version < self._config.run.num_steps
        return is_due and not has_evaluation(self._life.folder.path, version)

    async def _train(
        self,
        parts: Parts,
        evaluator: Evaluator,
        pinning: Pinning,
        best: BestModel,
        stop: asyncio.Event,
    ) -> None:
        config, restored = self._config, self._restored

        async def evaluate() -> None:
            evaluation = await evaluator.evaluate_beside_training()
            self.recorder.evaluation(evaluation)
            await best.after(evaluation)

        meter = LoopMeter(self._core, self._lag)
        rollouts = self._rollouts(parts, meter.fleet)
        self.recorder.summary.responses_lost = rollouts.lost_members
        loop = TrainingLoop(
            config=config,
            core=self._core,
            rollouts=rollouts,
            runner=StepRunner(
                config,
                parts.actor,
                parts.critics,
                self._table,
                None if restored is None else restored.state.memory,
            ),
            publisher=parts.publisher,
            pinning=pinning,
            before_evaluation=best.before,
            evaluate=evaluate,
            on_step=self.recorder.step,
            changed=self._changed,
            waits=self._waits,
            meter=meter,
            selection=self._selection,
            saver=self._saver(parts) if config.checkpoint.is_on else None,
            on_news=self.recorder.news,
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

    def _rollouts(self, parts: Parts, fleet: IdleClock) -> Rollouts:
        restored = self._restored
        return Rollouts(
            core=self._core,
            prompts=self._material.train,
            generator=parts.fleet,
            rewards=parts.rewards,
            decode=self._material.decode,
            settings=rollout_settings(self._config, self._material.sampling),
            on_group=self._on_group,
            changed=self._changed,
            waits=self._waits,
            groups=queued_groups(self._core, restored),
            begun=begun_samples(self._core, restored),
            lost=LostResponses(
                self._config.failures, None if restored is None else restored.state.lost_members
            ),
            fleet=fleet,
        )

    def _saver(self, parts: Parts) -> Saver:
        return Saver(
            settings=self._config.checkpoint,
            folder=CheckpointFolder(self._life.folder.checkpoints, self._config.checkpoint.keep),
            groups=_states(parts),
            prompts_crc32=crc32_of(self._material.train),
            tally=self.recorder.summary.to_json,
        )

    def _on_group(self, group: Group) -> None:
        if self._pool is not None:
            self._pool.arrived(group)
        if self._selection is not None and self._config.selection.count_dropped:
            self._selection.record(group)

    def _evaluator(self, parts: Parts, pinning: Pinning) -> Evaluator:
        return Evaluator(
            prompts=self._material.heldout,
            rewards=parts.rewards,
            decode=self._material.decode,
            sampling=self._material.sampling,
            settings=self._config.evaluation,
            deadline_s=self._config.fleet.group_deadline_s,
            pinning=pinning,
            waits=self._waits,
        )


def _states(parts: Parts) -> list[GroupState]:
    return [parts.actor.state, *(critic.state for critic in parts.critics)]


def rollout_settings(config: TrainConfig, sampling: SamplingParams) -> RolloutSettings:
    """What rollouts read of the configuration."""
    return RolloutSettings(
        group_size=config.batch.group_size,
        sampling=sampling,
        group_deadline_s=config.fleet.group_deadline_s,
        filter_groups=config.selection.group_filter == "replace",
        truncated_reward=truncated_reward(config.algorithm),
    )
