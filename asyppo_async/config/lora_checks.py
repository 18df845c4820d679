"""Settings of adapters (LoRA) that contradict each other, or what they are to train with."""

from asyppo_async.config.critic import CriticSection
from asyppo_async.config.learner_checks import Rules
from asyppo_async.config.sections import ActorSection, TrainConfig
from asyppo_async.config.serve import LORA_RANKS


def lora_rules(config: TrainConfig) -> Rules:
    """Pairs of whether something is wrong, and the reason."""
    critics = [config.critic.of(index) for index in range(config.critic.count)]
    rules = _published(config) + _of_learner("actor", config.actor)
    rules.append(
        (
            config.actor.lora_rank > 0 and config.actor.reference == "ema",
            "actor.reference = 'ema' follows an average of whole weights, and actor.lora_rank = "
            f"{config.actor.lora_rank} trains adapters; use reference = 'initial', or train whole weights",
        )
    )
    for critic in critics:
        rules += _of_learner("critic", critic)
        rules.append(
            (
                critic.lora_rank > 0 and "backbone" in critic.frozen,
                f"critic.lora_rank = {critic.lora_rank} trains adapters in the backbone, and critic.frozen = "
                "['backbone'] lets nothing of it train; leave one of them out",
            )
        )
    return rules


def _of_learner(name: str, section: ActorSection | CriticSection) -> Rules:
    return [
        (
            section.lora_targets != () and section.lora_rank == 0,
            f"{name}.lora_targets = {list(section.lora_targets)} names layers for adapters, and {name}.lora_rank is 0: "
            "there are none; set a rank (8, 16, 32, ...), or leave the targets out",
        )
    ]


def _published(config: TrainConfig) -> Rules:
    weights, rank = config.weights, config.actor.lora_rank
    alone = weights.lora == "adapter"
    return [
        (
            alone and rank == 0,
            'weights.lora = "adapter" publishes adapters alone, and actor.lora_rank = 0 has none; set a rank, or leave '
            "weights.lora out",
        ),
        (
            alone and weights.way == "direct",
            'weights.lora = "adapter" with weights.way = "direct": engines take adapters from host memory; use the way '
            'staged or folder, or weights.lora = "merged"',
        ),
        (
            alone and rank > LORA_RANKS[-1],
            f'weights.lora = "adapter" with actor.lora_rank = {rank}: engines serve adapters up to rank '
            f'{LORA_RANKS[-1]}; use a lower rank, or weights.lora = "merged"',
        ),
    ]
