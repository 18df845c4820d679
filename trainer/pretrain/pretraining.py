"""The loop of a value pretraining: batches in, critics out, over the same critic groups and requests as a run's."""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from asyppo_async.config.sections import TrainConfig
from asyppo_async.metrics import Metrics, merge
from asyppo_async.trainer.coordinator.batch import Batch
from asyppo_async.trainer.coordinator.critic_side import Critic, CriticSide
from asyppo_async.trainer.coordinator.measures.updates import update_metrics
from asyppo_async.trainer.coordinator.trace import Trace
from asyppo_async.trainer.critic_folder import critic_name
from asyppo_async.trainer.pretrain.kept import Kept, abandon_rows, read_kept, write_kept
from asyppo_async.trainer.pretrain.progress import Progress, StopRule, constant_loss, heldout_metrics
from asyppo_async.trainer.run_folder import RunFolder
from asyppo_async.trainer.worker.group_state import GroupState

_log = logging.getLogger(__name__)


NextBatch = Callable[[], Coroutine[object, object, Batch | None]]
"""Makes the next batch; None: there is none."""


class KeptCritic(Critic, Protocol):
    """A critic group, as a pretraining sees it."""

    @property
    def state(self) -> GroupState:
        """What a resume goes on from."""
        ...

    async def save(self, folder: Path) -> None: ...


class Pretraining:
    """Trains critics until the batches end or the rule says so."""

    def __init__(
        self,
        config: TrainConfig,
        critics: tuple[KeptCritic, ...],
        folder: RunFolder,
        *,
        heldout: Batch,
        edges: Sequence[int],
        rule: StopRule | None,
        on_phase: Callable[[str], None],
    ) -> None:
        """`heldout`: responses to prompts that nobody trains on; `edges`: of length buckets; `rule` None: none."""
        self._config = config
        self._critics = critics
        self._side = CriticSide(config, critics)
        self._folder = folder
        self._heldout = heldout
        self._edges = edges
        self._rule = rule
        self._on_phase = on_phase
        self._num_steps = 0
        self.progress = Progress()

    async def run(self, next_batch: NextBatch) -> Path:
        """All steps; the folder of the critics, for `critic.model`.

        Consumes batches, the next one made while the critics train on the one before; produces critics; waits for the
        critic groups and the source, each request with its deadline.
        """
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(next_batch())
            while (batch := await following) is not None:
                following = tasks.create_task(next_batch())
                if await self._step(batch):
                    following.cancel()
                    break
        self.progress.last_heldout = await self._measure()
        final = self._folder.path / "critics"
        await self._save(final)
        summary = {"outcome": "finished", "steps": self._num_steps, **self.progress.row()}
        self._folder.write_summary(summary)
        return final

    async def _step(self, batch: Batch) -> bool:
        """One optimizer step of every critic; whether the rule ends the pretraining with it."""
        self._num_steps += 1
        step = self._num_steps
        row = await self._train(batch, step)
        await asyncio.to_thread(self._folder.append_step, {"version": step, **row})
        self.progress.add(row, len(self._critics))
        self._on_phase(f"step {step}: loss {self.progress.losses[-1]:.4f}")
        if step % self._config.pretrain.checkpoint_every_steps == 0:
            await self._save(self._folder.path / "steps" / f"{step:06d}")
            await self._keep_state()
        measured = row.get("pretrain/heldout_explained_variance")
        return self._rule is not None and measured is not None and self._rule.is_over(step, measured)

    async def _train(self, batch: Batch, step: int) -> Metrics:
        started_s = time.monotonic()
        everything = np.ones(batch.sequences.num_response_tokens, dtype=np.bool_)
        trace = Trace()
        results = await self._side.train(batch, trace, None, everything)
        clip_norm = self._config.critic.max_grad_norm
        rows = [
            update_metrics(f"critic_{index}", result, clip_norm=clip_norm)
            for index, result in enumerate(results)
        ]
        rows.append({"pretrain/constant_loss": constant_loss(batch)})
        if step == 1 or step % self._config.pretrain.heldout_every_steps == 0:
            rows.append(await self._measure())
        rows.append(
            {
                "time/critic_train_s": trace.seconds("critic_train"),
                "time/step_s": time.monotonic() - started_s,
            }
        )
        return merge(rows)

    async def _measure(self) -> Metrics:
        values = await self._side.values(self._heldout, Trace())
        return heldout_metrics(self._heldout, values.of_tokens, self._edges)

    async def restore(self) -> int:
        """Go on from the newest checkpoint of the folder; the steps that are behind it, 0 if there is none.

        Raises:
            CheckpointError: It does not fit these critics.
        """
        kept = read_kept(self._folder)
        if kept is None:
            return 0
        for critic in self._critics:
            await critic.state.restore(self._folder.path / kept.folder)
        self._num_steps, self.progress = kept.num_steps, kept.progress
        if self._rule is not None:
            self._rule.best, self._rule.best_step = kept.best, kept.best_step
        await asyncio.to_thread(abandon_rows, self._folder, kept.num_steps)
        return kept.num_steps

    async def _keep_state(self) -> None:
        """Optimizers and weights of all critics, then the record that names them; the older ones go last."""
        place = Path("state") / f"{self._num_steps:06d}"
        await asyncio.to_thread((self._folder.path / place).mkdir, parents=True, exist_ok=True)
        for critic in self._critics:
            await critic.state.save(self._folder.path / place)
        rule = self._rule or StopRule(self._config.pretrain)
        kept = Kept(
            folder=str(place),
            num_steps=self._num_steps,
            progress=self.progress,
            best=rule.best,
            best_step=rule.best_step,
        )
        await asyncio.to_thread(write_kept, self._folder, kept)

    async def _save(self, folder: Path) -> None:
        """Every critic, in place of an older one there."""
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        async with asyncio.TaskGroup() as tasks:
            for index, critic in enumerate(self._critics):
                tasks.create_task(critic.save(folder / critic_name(index)))
