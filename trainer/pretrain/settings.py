"""The settings of a run, as value pretraining reads them."""

import math
from pathlib import Path
from typing import get_args

from asyppo_async.config.critic import CriticPartName, CriticSection, OneCritic
from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import ConfigError

POOL_FROZEN: tuple[CriticPartName, ...] = ("attention", "router", "vision")


def over_pool(config: TrainConfig, num_steps: int) -> TrainConfig:
    """Half squared error on the returns, a cosine, parts of the backbone frozen (S3AC, stage 1).

    Args:
        config: Of the run.
        num_steps: Optimizer steps of the whole pretraining.
    """
    pretrain = config.pretrain
    frozen = {*config.critic.frozen, *(POOL_FROZEN if pretrain.freeze_pool else ())}
    return _with_critic(
        config,
        learning_rate=pretrain.learning_rate,
        final_learning_rate=pretrain.final_learning_rate,
        schedule_steps=num_steps,
        learning_rate_warmup_steps=math.ceil(pretrain.rise_share * num_steps),
        frozen=tuple(part for part in get_args(CriticPartName) if part in frozen),
    )


def over_policy(config: TrainConfig, policy: Path) -> TrainConfig:
    """Monte Carlo targets from a frozen policy, a constant learning rate (VC-PPO, section 3.2)."""
    changed = _with_critic(
        config,
        learning_rate=config.pretrain.policy_learning_rate,
        final_learning_rate=None,
        schedule_steps=0,
        learning_rate_warmup_steps=0,
        frozen=config.critic.frozen,
    )
    changed = changed.without_training_of_actor()
    return changed.model_copy(update={"actor": changed.actor.model_copy(update={"model": policy})})


def _of_one(own: OneCritic, frozen: object) -> dict[str, object]:
    """Pretraining has one learning rate; what is frozen of all is frozen of each."""
    assert isinstance(frozen, tuple)
    parts = None if own.frozen is None else tuple(dict.fromkeys((*own.frozen, *frozen)))
    return own.model_dump() | {"learning_rate": None, "head_learning_rate": None, "frozen": parts}


def _with_critic(config: TrainConfig, **changes: object) -> TrainConfig:
    if config.critic.count == 0 or (config.critic.model is None and not config.critic.each):
        raise ConfigError("there is no critic to pretrain: set critic.count and critic.model")
    critic = config.critic.model_dump() | {
        "max_grad_norm": config.pretrain.max_grad_norm,
        "mini_batches": 1,
        "epochs": 1,
        "value_clip": None,
        "half_loss": True,
        "warmup_steps": 0,
        **changes,
        "each": [_of_one(own, changes["frozen"]) for own in config.critic.each],
    }
    run = {"name": f"{config.run.name}-critics"}
    return config.model_copy(
        update={
            "run": config.run.model_copy(update=run),
            "critic": CriticSection.model_validate(critic),
            "algorithm": config.algorithm.model_copy(update={"lambda_critic": 1.0}),
        }
    )
