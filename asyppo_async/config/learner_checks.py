"""Contradictions in how models are held and trained: what is offloaded and by which engine, mini-batches and batch."""

from asyppo_async.config.critic import CriticSection
from asyppo_async.config.sections import ActorSection, TrainConfig

Rules = list[tuple[bool, str]]


def offloading(config: TrainConfig) -> Rules:
    """Of the actor, and of the critics if there are any."""
    rules = _offload_of("actor", config.actor)
    if config.critic.count:
        rules += _offload_of("critic", config.critic)
    return rules


def placing(config: TrainConfig) -> Rules:
    """Of groups on devices."""
    colocated = config.placement.mode == "colocated"
    bound = _local_devices(config)
    twice = sorted(
        {device for index, own in enumerate(bound) for other in bound[:index] for device in own & other}
    )
    learners = [config.actor, *([config.critic] if config.critic.count else [])]
    return [
        (
            colocated and config.algorithm.schedule == "critic_ahead",
            "algorithm.schedule = 'critic_ahead' has the critics train beside the actor, and with placement.mode = "
            "'colocated' groups compute in turn; use the schedule 'post', or placement.mode = 'split'",
        ),
        (
            not colocated and bool(twice),
            f"placement.mode = 'split' gives groups devices of their own, and device {twice[0] if twice else ''} is in "
            "the devices of more than one; name different ones, or use placement.mode = 'colocated'",
        ),
        (
            colocated
            and config.placement.moves != "none"
            and any(
                (learner.backend, learner.zero_stage, learner.dtype) == ("deepspeed", 1, "bfloat16")
                for learner in learners
            ),
            "placement.mode = 'colocated': DeepSpeed cannot move what it holds for bfloat16 with zero_stage = 1; use "
            "zero_stage = 2, or placement.moves = 'none'",
        ),
    ]


def moving(config: TrainConfig) -> Rules:
    """Of weights that do not train, of which DeepSpeed moves nothing."""
    learners = {"actor": config.actor} | ({"critic": config.critic} if config.critic.count else {})
    return [
        (
            config.placement.mode == "colocated"
            and config.placement.moves == "all"
            and learner.backend == "deepspeed"
            and (learner.lora_rank > 0 or bool(getattr(learner, "frozen", ()))),
            f"placement.moves = 'all': DeepSpeed moves trained weights only, and some of the {name}'s do not train; "
            f"use placement.moves = 'optimizer', or {name}.backend = 'plain'",
        )
        for name, learner in learners.items()
    ]


def _local_devices(config: TrainConfig) -> list[set[int]]:
    """Of each group that is all on this machine: elsewhere the same index is another device."""
    critic = config.critic
    learners = [
        config.actor,
        *[critic.of(index) for index in range(critic.count if _described(config) else 0)],
    ]
    return [set(learner.devices) for learner in learners if learner.local_ranks in (None, learner.num_ranks)]


def _described(config: TrainConfig) -> bool:
    return len(config.critic.each) in (0, config.critic.count)


def sizes(config: TrainConfig) -> Rules:
    """Mini-batches that a batch does not fill."""
    critic, num_responses = config.critic, config.batch.prompts * config.batch.group_size
    of_each_critic = num_responses if critic.data == "shared" else num_responses // max(1, critic.count)
    return [
        (
            config.actor.mini_batches > num_responses,
            f"actor.mini_batches = {config.actor.mini_batches} exceeds the {num_responses} responses of a batch",
        ),
        (
            critic.count > 0 and critic.mini_batches > max(1, of_each_critic),
            f"critic.mini_batches = {critic.mini_batches} exceeds the {of_each_critic} responses that each critic gets "
            "of a batch",
        ),
    ]


def _offload_of(name: str, section: ActorSection | CriticSection) -> Rules:
    offload = section.offload
    optimizer, weights = offload.optimizer, offload.weights
    return [
        (
            (optimizer, weights) != ("none", "none") and section.backend != "deepspeed",
            f"{name}.offload is DeepSpeed's, and {name}.backend is {section.backend!r}; use backend = 'deepspeed', or "
            "placement.mode = 'colocated' to move what another group needs the room of",
        ),
        (
            weights != "none" and section.zero_stage != 3,
            f"{name}.offload.weights moves partitioned weights, which are only with {name}.zero_stage = 3, got "
            f"{section.zero_stage}",
        ),
        (
            optimizer != "none" and section.dtype == "bfloat16" and section.zero_stage != 3,
            f"{name}.offload.optimizer = {optimizer!r} with {name}.dtype = 'bfloat16' and {name}.zero_stage = "
            f"{section.zero_stage}: DeepSpeed would sum the gradients of micro-batches in bfloat16; use zero_stage = 3 "
            "or float32",
        ),
    ]
