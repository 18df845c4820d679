"""The responses of a run on their way into a pool: one shard for each training step."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from asyppo_async.algorithms.token_classes import TokenClass
from asyppo_async.config.pool import PoolSection
from asyppo_async.config.sections import TrainConfig
from asyppo_async.trainer.coordinator.step import StepResult
from asyppo_async.trainer.material import Material
from asyppo_async.trainer.pool.shards import SUFFIX, Pooled, Vocabulary, write_shard
from asyppo_async.types import Group, Trajectory

_log = logging.getLogger(__name__)


class PoolSaver:
    """Keeps groups from their arrival to the end of the step; a disk that is full costs shards, not the run."""

    def __init__(self, settings: PoolSection, vocabulary: Vocabulary, run: str, *, kept_only: bool) -> None:
        """`kept_only`: only responses that train the actor (`algorithm.critic_trains_on = "kept"`)."""
        self._settings = settings
        self._vocabulary = vocabulary
        self._run = run
        self._kept_only = kept_only
        self._arrived: list[Group] = []
        self.num_failed = 0
        """Shards that could not be written."""

    def arrived(self, group: Group) -> None:
        """A group is complete and rewarded, whatever becomes of it."""
        if not self._kept_only:
            self._arrived.append(group)

    def step(self, result: StepResult, version: int) -> None:
        """Write what there is; in a thread."""
        arrived, self._arrived = self._arrived, []
        kept = (
            _trained(result) if self._kept_only else [one for group in arrived for one in group.trajectories]
        )
        if not kept:
            return
        rows = [Pooled(trajectory=one, policy=self._policy_of(one)) for one in kept]
        try:
            write_shard(self._path(version), rows, self._vocabulary)
        except OSError as error:
            self.num_failed += 1
            _log.warning("%s; %d trajectories are not in the pool", error, len(rows))

    def _path(self, version: int) -> Path:
        """The same for a step that a resumed run repeats."""
        return self._settings.path / f"{self._run}-{version:06d}{SUFFIX}"

    def _policy_of(self, trajectory: Trajectory) -> str:
        step = self._settings.policy_steps
        return f"{self._run}@{trajectory.oldest_version // step * step}"


def pool_saver(config: TrainConfig, material: Material) -> PoolSaver | None:
    """Of a run with `pool.save`; None: it keeps nothing."""
    if not config.pool.save:
        return None
    identity = material.identity
    vocabulary = Vocabulary(tokenizer_fingerprint=identity.tokenizer_fingerprint, size=identity.vocab_size)
    kept_only = config.algorithm.critic_trains_on == "kept"
    return PoolSaver(config.pool, vocabulary, config.run.name, kept_only=kept_only)


def _trained(result: StepResult) -> Sequence[Trajectory]:
    """Responses of which a token trained the actor."""
    is_trained = (result.decisions.classes == int(TokenClass.TRAINED)).numpy()
    ends = np.cumsum(result.batch.lengths)
    starts = ends - result.batch.lengths
    everyone = [one for group in result.batch.groups for one in group.trajectories]
    return [
        one for one, start, end in zip(everyone, starts, ends, strict=True) if is_trained[start:end].any()
    ]
