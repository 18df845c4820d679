"""`asyppo-train pretrain-critics`: over a trajectory pool (S3AC), or over a frozen policy (VC-PPO)."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np

from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import ConfigError, FleetError
from asyppo_async.fingerprint import model_identity
from asyppo_async.logs import set_up_logging
from asyppo_async.trainer.coordinator.batch import Batch, batch_of
from asyppo_async.trainer.coordinator.sampler import EpochSampler
from asyppo_async.trainer.critic_folder import critic_folders
from asyppo_async.trainer.material import Material, check_model_folder, open_material
from asyppo_async.trainer.parts import open_parts_once
from asyppo_async.trainer.pool.coverage import length_edges
from asyppo_async.trainer.pool.pool import check_both_verdicts, open_pool
from asyppo_async.trainer.pool.shards import Vocabulary
from asyppo_async.trainer.pretrain import settings
from asyppo_async.trainer.pretrain.kept import open_folder
from asyppo_async.trainer.pretrain.pool_batches import PoolBatches, open_batches
from asyppo_async.trainer.pretrain.pretraining import NextBatch, Pretraining
from asyppo_async.trainer.pretrain.progress import Progress, StopRule
from asyppo_async.trainer.pretrain.shares import MAX_HELDOUT_RESPONSES, heldout_prompts
from asyppo_async.trainer.sampled import Sampling
from asyppo_async.trainer.worker.group import open_critic_groups
from asyppo_async.trainer.worker.specs import GroupTimes

Say = Callable[[str], None]


async def pretrain_over_pool(
    config: TrainConfig, folder: Path, log_level: str, on_phase: Say, on_line: Say, *, resume: bool = False
) -> Progress:
    """Two epochs (`pretrain.epochs`) over a pool, without actor and fleet.

    Raises:
        AsyppoError: The pool is empty, of another tokenizer or of one verdict; or a group failed.
    """
    pool = open_pool(folder)
    check_both_verdicts(pool)
    batches = open_batches(pool, settings.over_pool(config, 1))
    config = settings.over_pool(config, batches.num_steps)
    for own in critic_folders(config.critic):
        check_model_folder(own, "critic.model")
        identity = model_identity(own)
        pool.check(
            Vocabulary(tokenizer_fingerprint=identity.tokenizer_fingerprint, size=identity.vocab_size), own
        )
    run_folder = open_folder(config, resume=resume)
    set_up_logging(log_level, run_folder.logs / "trainer.log", console=False)
    times = GroupTimes(
        join_timeout_s=config.run.join_timeout_s,
        request_timeout_s=config.run.request_timeout_s,
        silent_after_s=config.run.silent_after_s,
    )
    on_phase("starting the critics")
    async with open_critic_groups(
        actor=config.actor, critic=config.critic, seed=config.run.seed, folder=run_folder.path, times=times
    ) as critics:
        pretraining = Pretraining(
            config,
            critics,
            run_folder,
            heldout=await asyncio.to_thread(batches.heldout_batch),
            edges=length_edges(pool.entries, config.pool.length_edges),
            rule=None,
            on_phase=on_phase,
        )
        final = await pretraining.run(_read(batches, await pretraining.restore()))
    on_line(f"critics: {final}; use them with --set critic.model={final}")
    return pretraining.progress


async def pretrain_over_policy(
    config: TrainConfig, policy: Path, log_level: str, on_phase: Say, on_line: Say, *, resume: bool = False
) -> Progress:
    """Fresh responses of a frozen policy, until held-out explained variance no longer rises.

    Raises:
        AsyppoError: As a run.
    """
    config = settings.over_policy(config, policy)
    material = await open_material(config)
    run_folder = open_folder(config, resume=resume)
    set_up_logging(log_level, run_folder.logs / "trainer.log", console=False)
    out = heldout_prompts(material.train, config.pretrain.heldout_share, config.run.seed)
    group_size = config.batch.group_size
    async with open_parts_once(config, material, run_folder, on_phase, on_line) as parts:
        sampling = Sampling(config, material, parts.fleet, parts.rewards)
        on_phase("sampling held-out prompts")
        num = max(1, MAX_HELDOUT_RESPONSES // group_size)
        groups = await sampling.groups([material.train[prompt] for prompt in sorted(out)[:num]], group_size)
        if not groups:
            raise ConfigError("no held-out response was scored; see the warnings above")
        heldout = batch_of(0, groups, config)
        pretraining = Pretraining(
            config,
            parts.critics,
            run_folder,
            heldout=heldout,
            edges=_length_edges(config, heldout),
            rule=StopRule(config.pretrain),
            on_phase=on_phase,
        )
        start = await pretraining.restore()
        final = await pretraining.run(_sampled(sampling, config, material, out, start))
    on_line(f"critics: {final}; use them with --set critic.model={final}")
    return pretraining.progress


def _read(batches: PoolBatches, start: int) -> NextBatch:
    """From step `start` on."""
    steps = iter(range(start, batches.num_steps))

    async def read() -> Batch | None:
        step = next(steps, None)
        return None if step is None else await asyncio.to_thread(batches.batch, step)

    return read


def _sampled(
    sampling: Sampling, config: TrainConfig, material: Material, heldout: frozenset[str], start: int
) -> NextBatch:
    """Draws prompts that are not held out, epoch after epoch, up to `pretrain.max_steps`."""
    ids = [prompt for prompt in material.train if prompt not in heldout]
    order = EpochSampler(prompt_ids=ids, seed=config.run.seed, num_epochs=None)
    group_size = config.batch.group_size
    num_prompts = max(1, -(-config.pretrain.responses * config.critic.count // group_size))
    order.seek(start * num_prompts)
    steps = iter(range(start, config.pretrain.max_steps))

    async def draw() -> Batch | None:
        step = next(steps, None)
        if step is None:
            return None
        chosen = [material.train[order.next_candidate().prompt_id] for _ in range(num_prompts)]
        groups = await sampling.groups(chosen, group_size)
        if not groups:
            raise FleetError(f"none of {num_prompts * group_size} responses of step {step} was scored")
        return await asyncio.to_thread(batch_of, step, groups, config)

    return draw


def _length_edges(config: TrainConfig, heldout: Batch) -> tuple[int, ...]:
    """The configured ones, or the quartiles of the held-out responses."""
    quartiles = np.quantile(heldout.lengths, (0.25, 0.5, 0.75))
    return config.pool.length_edges or tuple(sorted({int(edge) for edge in quartiles}))
