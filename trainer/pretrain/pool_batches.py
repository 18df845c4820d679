"""The batches of a pretraining over a pool: one optimizer step of every critic each, a function of seed and step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from asyppo_async.config.sections import TrainConfig
from asyppo_async.trainer.coordinator.batch import Batch, batch_of
from asyppo_async.trainer.pool.coverage import balanced_shares, length_edges
from asyppo_async.trainer.pool.pool import Pool
from asyppo_async.trainer.pool.shards import Entry
from asyppo_async.trainer.pretrain.shares import MAX_HELDOUT_RESPONSES, deal, heldout_prompts
from asyppo_async.types import Group, Trajectory


@dataclass(frozen=True, slots=True)
class PoolBatches:
    config: TrainConfig
    pool: Pool
    trained: tuple[Entry, ...]
    shares: tuple[NDArray[np.int64], ...]
    """For each critic indices into `trained`."""
    heldout: tuple[Entry, ...]

    @property
    def steps_per_epoch(self) -> int:
        return max(1, -(-max(map(len, self.shares)) // self.config.pretrain.responses))

    @property
    def num_steps(self) -> int:
        return self.steps_per_epoch * self.config.pretrain.epochs

    def batch(self, step: int) -> Batch:
        """Of the 0-based optimizer step, read from the disk."""
        epoch, place = divmod(step, self.steps_per_epoch)
        parts = [self._rows(critic, epoch)[place] for critic in range(len(self.shares))]
        trajectories = self.pool.read([self.trained[index] for part in parts for index in part])
        ends = np.cumsum([len(part) for part in parts])
        rows = np.split(np.arange(len(trajectories), dtype=np.int64), ends[:-1])
        return replace(batch_of_singles(step, trajectories, self.config), critic_shares=tuple(rows))

    def heldout_batch(self) -> Batch:
        return batch_of_singles(0, self.pool.read(self.heldout), self.config)

    def _rows(self, critic: int, epoch: int) -> list[NDArray[np.int64]]:
        """The critic's share in the order of that epoch, step by step."""
        own = self.shares[critic]
        generator = np.random.default_rng((self.config.run.seed, epoch, critic))
        if self.config.pretrain.balance:
            entries = [self.trained[index] for index in own]
            edges = length_edges(self.trained, self.config.pool.length_edges)
            order = generator.choice(own, size=len(own), p=balanced_shares(entries, edges))
        else:
            order = generator.permutation(own)
        return np.array_split(order, self.steps_per_epoch)


def open_batches(pool: Pool, config: TrainConfig) -> PoolBatches:
    """Hold prompts out and deal the trajectories of the others to the critics.

    Raises:
        ConfigError: The split lets a critic miss a prompt.
    """
    out = heldout_prompts(
        (entry.prompt_id for entry in pool.entries), config.pretrain.heldout_share, config.run.seed
    )
    trained = tuple(entry for entry in pool.entries if entry.prompt_id not in out)
    heldout = [entry for entry in pool.entries if entry.prompt_id in out]
    order = np.random.default_rng((config.run.seed, 99)).permutation(len(heldout))
    shares = deal(trained, num_critics=config.critic.count, data=config.critic.data, seed=config.run.seed)
    chosen = tuple(heldout[index] for index in sorted(order[:MAX_HELDOUT_RESPONSES]))
    return PoolBatches(config, pool, trained, shares, chosen)


def batch_of_singles(step: int, trajectories: Sequence[Trajectory], config: TrainConfig) -> Batch:
    """Each trajectory as a group of its own."""
    groups = [
        Group(draw_id=index, prompt=one.prompt, admission_version=0, trajectories=(one,), finished_s=0.0)
        for index, one in enumerate(trajectories)
    ]
    return batch_of(step, groups, config)
