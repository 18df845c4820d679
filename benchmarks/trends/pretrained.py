"""Value pretraining over a pool in one process: pool, batches and critics' code are those of the command."""

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from asyppo_async.algorithms.metrics import explained_variance_sums
from asyppo_async.algorithms.packed import spread
from asyppo_async.config.sections import TrainConfig
from asyppo_async.trainer.coordinator.batch import Batch
from asyppo_async.trainer.coordinator.critic_side import CriticSide
from asyppo_async.trainer.coordinator.trace import Trace
from asyppo_async.trainer.pool.pool import open_pool
from asyppo_async.trainer.pool.shards import Pooled, Vocabulary, write_shard
from asyppo_async.trainer.pretrain import settings
from asyppo_async.trainer.pretrain.pool_batches import batch_of_singles, open_batches
from asyppo_async.trainer.worker.model import Policy
from asyppo_async.types import SamplingParams, Trajectory
from benchmarks.trends.arm_run import open_arm
from benchmarks.trends.arms import ACTOR_SIZE, Arm
from benchmarks.trends.critic_arms import SCORED
from benchmarks.trends.critic_tasks import LEAST_LONG, LONG, TinyTask
from benchmarks.trends.learning import local_critics
from benchmarks.trends.sampler import TinySampler
from benchmarks.trends.task import VOCABULARY, fresh_models

Rows = list[dict[str, float | str]]
STAGES = (0, 20, 40)
"""Training steps of the policies of a coverage pool; the initial pool has as many trajectories, all of the first."""
IMPROVED = 60
"""Training steps of the policy that critics are judged on."""
SAMPLES = 4
TEACHER = Arm(name="teacher", against="teacher", preset="grpo", overrides=(SCORED,), task=LONG)
"""Improves on the long task without any critic, so that no critic is judged on a policy of its own."""
RATES = ("pretrain.learning_rate=4e-3", "pretrain.final_learning_rate=2e-3", "pretrain.responses=64")
HEADS = (0.0, 0.05, 0.5)
"""Std of the value head; 0: 1 / (H + 1)."""
CLIPS = (1.0, 10.0)


def coverage_and_heads(seed: int) -> Rows:
    """A coverage pool against one of the initial policy, and the value head's std and clip on the former."""
    pools, improved = asyncio.run(_pools(seed))
    judged = batch_of_singles(0, improved, _config(seed))
    rows: Rows = []
    for name, pool in pools.items():
        rows.append({"kind": "pool", "pool": name, **_pretrained(_config(seed), pool, judged)})
    for std in HEADS:
        for clip in CLIPS:
            config = _config(seed, f"critic.head_std={std}", f"pretrain.max_grad_norm={clip}")
            found = _pretrained(config, pools["coverage"], judged)
            rows.append({"kind": "head", "std": std, "clip": clip, **found})
    return rows


def _config(seed: int, *overrides: str) -> TrainConfig:
    arm = Arm(
        name="critic", against="critic", preset="s3ac",
        overrides=(SCORED, *RATES, "pretrain.freeze_pool=false", *overrides), task=LONG,
    )  # fmt: skip
    return arm.config(seed)


async def _pools(seed: int) -> tuple[dict[str, list[Pooled]], list[Trajectory]]:
    run = await open_arm(TEACHER, seed)
    stages: dict[int, list[Trajectory]] = {}
    while True:
        if run.step in (*STAGES, IMPROVED):
            num = SAMPLES * len(STAGES) if run.step == 0 else SAMPLES
            stages[run.step] = sampled(run.policy, LONG, num, seed=1000 * seed + run.step)
        if run.step == IMPROVED:
            break
        await run.train()
    initial = stages[0]
    first = [one for one in initial if one.sample_index < SAMPLES]
    coverage = [(0, first), *((stage, stages[stage]) for stage in STAGES[1:])]
    pools = {
        "initial policy": [Pooled(trajectory=one, policy="0") for one in initial],
        "coverage": [Pooled(trajectory=one, policy=str(stage)) for stage, part in coverage for one in part],
    }
    return pools, stages[IMPROVED]


def sampled(policy: Policy, task: TinyTask, num_samples: int, seed: int) -> list[Trajectory]:
    """`num_samples` scored responses to every prompt of the task."""
    sampling = SamplingParams(
        temperature=1.0, top_p=1.0, top_k=0, min_tokens=0, max_tokens=task.max_tokens,
        stop_token_ids=task.stop_token_ids,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    sampler = TinySampler(policy, sampling, generator, fixed_length=task.has_fixed_length)
    groups = sampler.sample(task.prompts, num_samples=num_samples, version=0)
    return [
        Trajectory(
            prompt=prompt, draw_id=number, sample_index=index, response=response,
            reward=task.reward(prompt, response.token_ids.tolist()), server="", started_s=0.0, finished_s=0.0,
        )
        for number, (prompt, group) in enumerate(zip(task.prompts, groups, strict=True))
        for index, response in enumerate(group)
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Figures:
    losses: list[float]
    clipped: list[bool]

    def row(self) -> dict[str, float]:
        return {
            "loss_first": float(np.mean(self.losses[:20])),
            "loss_last": float(np.mean(self.losses[-20:])),
            "clipped": float(np.mean(self.clipped)),
        }


def _pretrained(config: TrainConfig, pool: Sequence[Pooled], judged: Batch) -> dict[str, float]:
    """Pretrain one fresh critic on a pool, and judge it on responses of the improved policy."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.safetensors"
        write_shard(path, pool, Vocabulary(tokenizer_fingerprint="", size=VOCABULARY))
        first = open_batches(open_pool(Path(folder)), config)
        batches = open_batches(first.pool, settings.over_pool(config, first.num_steps))
        _, critics = fresh_models(batches.config, actor_size=ACTOR_SIZE, critic_size=ACTOR_SIZE)
        side = CriticSide(batches.config, local_critics(batches.config, critics))
        figures = asyncio.run(
            _train(side, batches.config, [batches.batch(step) for step in range(batches.num_steps)])
        )
    values = asyncio.run(side.values(judged, Trace())).of_tokens[0]
    return {**figures.row(), **_judgement(judged, torch.from_numpy(values))}


async def _train(side: CriticSide, config: TrainConfig, batches: Sequence[Batch]) -> _Figures:
    losses, clipped = [], []
    for batch in batches:
        everything = np.ones(batch.sequences.num_response_tokens, dtype=np.bool_)
        (result,) = await side.train(batch, Trace(), None, everything)
        losses += [step.loss for step in result.steps]
        clipped += [step.grad_norm > config.critic.max_grad_norm for step in result.steps]
    return _Figures(losses, clipped)


def _judgement(batch: Batch, values: torch.Tensor) -> dict[str, float]:
    lengths = torch.from_numpy(batch.lengths)
    returns = spread(torch.from_numpy(batch.rewards), lengths)
    long = spread(lengths >= LEAST_LONG, lengths)
    right = spread(torch.from_numpy(batch.correct), lengths)
    return {
        "accuracy": float(batch.correct.mean()),
        "explained": explained_variance_sums(returns, values).explained_variance,
        "explained_long": explained_variance_sums(returns, values, long).explained_variance,
        "error_long_right": explained_variance_sums(returns, values, long & right).mean_squared_error,
    }
