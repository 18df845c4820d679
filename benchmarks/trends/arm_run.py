"""An arm of a study as a run in this process, from fresh models."""

from asyppo_async.config.sections import TrainConfig
from benchmarks.trends.arms import ACTOR_SIZE, Arm
from benchmarks.trends.learning import TinyRun
from benchmarks.trends.task import fresh_models


async def open_arm(arm: Arm, seed: int) -> TinyRun:
    """A run of the arm from fresh models, its critics pretrained on the frozen policy where the arm says so."""
    config, task = arm.config(seed), arm.task
    policy, critics = fresh_models(config, actor_size=ACTOR_SIZE, critic_size=arm.critic_size)

    def run_of(config: TrainConfig) -> TinyRun:
        return TinyRun(
            config,
            policy=policy,
            critics=critics,
            prompts=task.prompts,
            reward=task.reward,
            stop_token_ids=task.stop_token_ids,
            lag=arm.lag,
            engine=arm.engine,
            fixed_length=task.has_fixed_length,
        )

    if arm.pretrain_steps:
        monte_carlo = {"algorithm": config.algorithm.model_copy(update={"lambda_critic": 1.0})}
        warming = {"critic": config.critic.model_copy(update={"warmup_steps": arm.pretrain_steps})}
        pretraining = run_of(config.model_copy(update={**monte_carlo, **warming}))
        for _ in range(arm.pretrain_steps):
            await pretraining.train()
    return run_of(config)
