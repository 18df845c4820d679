"""`asyppo-train pool collect`: trajectories of several policies, one after the other, into a pool."""

from collections.abc import Callable
from pathlib import Path

from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import ConfigError
from asyppo_async.trainer.coordinator.mixed_sampler import open_sampler
from asyppo_async.trainer.material import check_model_folder, open_material
from asyppo_async.trainer.parts import open_parts_once
from asyppo_async.trainer.pool.shards import SUFFIX, Pooled, Vocabulary, write_shard
from asyppo_async.trainer.run_folder import RunFolder
from asyppo_async.trainer.sampled import Sampling

SHARD_PROMPTS = 64
"""Prompts of one shard: what an interruption may lose."""


async def collect(
    config: TrainConfig, on_phase: Callable[[str], None], on_line: Callable[[str], None]
) -> None:
    """Sample every policy of `pool.policies` on the same prompts; shards that are there from before are kept.

    Raises:
        AsyppoError: A policy is missing or of another tokenizer, or the fleet failed.
    """
    policies = config.pool.policies
    if not policies:
        raise ConfigError(
            "pool.policies names no policy: list model folders from weak to strong, "
            '--set pool.policies=\'["runs/early/model", "runs/late/model"]\''
        )
    for policy in policies:
        check_model_folder(policy, "pool.policies")
    vocabulary: Vocabulary | None = None
    for number, policy in enumerate(policies):
        vocabulary = await _collect_of(
            _config_of(config, policy, number), policy, vocabulary, on_phase, on_line
        )


def _config_of(config: TrainConfig, policy: Path, number: int) -> TrainConfig:
    """The run's settings with the policy in place of the actor and without critics."""
    config = config.without_training_of_actor()
    return config.model_copy(
        update={
            "run": config.run.model_copy(
                update={"name": f"{config.run.name}-pool-{number}", "overwrite": True}
            ),
            "actor": config.actor.model_copy(update={"model": policy}),
            "critic": config.critic.model_copy(update={"count": 0}),
        }
    )


async def _collect_of(
    config: TrainConfig,
    policy: Path,
    earlier: Vocabulary | None,
    on_phase: Callable[[str], None],
    on_line: Callable[[str], None],
) -> Vocabulary:
    material = await open_material(config)
    vocabulary = Vocabulary(
        tokenizer_fingerprint=material.identity.tokenizer_fingerprint, size=material.identity.vocab_size
    )
    if earlier not in (None, vocabulary):
        raise ConfigError(f"pool.policies: {policy} has another tokenizer than the policies before it")
    order = open_sampler(material.shares, config.run.seed)
    num_prompts = min(config.pool.prompts, len(material.train))
    chosen = [material.train[order.next_candidate().prompt_id] for _ in range(num_prompts)]
    folder = RunFolder.create(config)
    async with open_parts_once(config, material, folder, on_phase, on_line) as parts:
        sampling = Sampling(config, material, parts.fleet, parts.rewards)
        num_saved = num_right = 0
        for number, start in enumerate(range(0, len(chosen), SHARD_PROMPTS)):
            prompts = chosen[start : start + SHARD_PROMPTS]
            on_phase(f"{policy}: {num_saved} trajectories")
            groups = await sampling.groups(prompts, config.batch.group_size)
            rows = [
                Pooled(trajectory=one, policy=str(policy)) for group in groups for one in group.trajectories
            ]
            if not rows:
                continue
            name = str(policy).strip("./").replace("/", "-")
            write_shard(config.pool.path / f"{name}-{number:05d}{SUFFIX}", rows, vocabulary)
            num_saved += len(rows)
            num_right += sum(row.trajectory.reward >= 1 for row in rows)
    share = num_right / num_saved if num_saved else 0.0
    on_line(f"{policy}: {num_saved} trajectories, {share:.1%} right, {sampling.num_lost} lost")
    return vocabulary
