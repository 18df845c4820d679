"""Settings of the actor alone that contradict each other."""

from asyppo_async.config.learner_checks import Rules
from asyppo_async.config.sections import TrainConfig


def actor_rules(config: TrainConfig) -> Rules:
    """Whether each holds, and what is wrong then."""
    actor = config.actor
    return [
        (
            actor.float32_head and actor.dtype != "bfloat16",
            f"actor.float32_head changes nothing with actor.dtype = {actor.dtype!r}, whose head is of that type "
            "already; leave it out",
        ),
        (
            actor.ema_decay > 0 and actor.lora_rank > 0,
            f"actor.ema_decay = {actor.ema_decay} averages each trained tensor, and with actor.lora_rank = "
            f"{actor.lora_rank} that is the factors of the adapters, whose product is no average of weights; leave one "
            "of them out",
        ),
        (
            actor.reference == "ema" and actor.ema_decay == 0,
            "actor.reference = 'ema' is the moving average of the weights, and actor.ema_decay = 0 keeps none; set a "
            "decay (0.99), or reference = 'initial'",
        ),
    ]
