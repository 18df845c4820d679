"""Which worker groups a run's settings ask for, and what each rank of them is told."""

from dataclasses import dataclass, replace
from pathlib import Path

from asyppo_async.config.critic import CriticSection
from asyppo_async.config.learner import PublishedLora
from asyppo_async.config.sections import ActorSection
from asyppo_async.errors import ConfigError
from asyppo_async.trainer.critic_folder import critic_folder
from asyppo_async.trainer.worker.control import Offload, WorkerSettings
from asyppo_async.trainer.worker.learning_rate import LearningRate
from asyppo_async.trainer.worker.rendezvous import WantedGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """One group: what it is and how many of its ranks are started here; the others join by themselves."""

    settings: WorkerSettings
    critic: int | None
    num_ranks: int
    num_local_ranks: int
    devices: tuple[int, ...] = ()
    """Indices on each machine; empty: as they come."""

    @property
    def wanted(self) -> WantedGroup:
        return WantedGroup(role=self.settings.role, critic=self.critic, num_ranks=self.num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTimes:
    """How long the coordinator waits, in seconds."""

    join_timeout_s: float
    """For all ranks to connect, and then for all models to be loaded."""
    request_timeout_s: float
    """For one forward, training step or save."""
    silent_after_s: float
    """For a sign of life of a rank; heartbeats come every 2 s."""


def specs_of(
    actor: ActorSection,
    critic: CriticSection,
    *,
    seed: int,
    bucket_bytes: int,
    times: GroupTimes,
    training_steps: int = 0,
    publish: PublishedLora = "merged",
) -> tuple[GroupSpec, ...]:
    """The actor's group first, then one per critic.

    `training_steps` of the run are those over which a learning rate comes down that names no steps of its own.
    `publish`: of an actor with adapters, all its weights or the adapters alone.
    """
    specs = []
    for index in range(-1, critic.count):
        own = None if index < 0 else critic.of(index)
        section = own or actor
        if section.model is None:
            raise ConfigError(f"critic.model is missing, and critic.count is {critic.count}")
        settings = WorkerSettings(
            role="actor" if index < 0 else "critic",
            model=str((section.model if own is None else critic_folder(section.model, index)).absolute()),
            dtype=section.dtype,
            backend=section.backend,
            zero_stage=section.zero_stage,
            zero_whole_below=section.zero_whole_below,
            offload=_offload_of(section),
            learning_rate=learning_rate_of(section, training_steps),
            weight_decay=section.weight_decay,
            max_grad_norm=section.max_grad_norm,
            micro_batch_tokens=section.micro_batch_tokens,
            packing=section.packing,
            recompute=section.recompute,
            lora_rank=section.lora_rank,
            lora_alpha=section.lora_alpha,
            lora_targets=section.lora_targets,
            num_threads=section.num_threads,
            non_finite_budget=section.non_finite_budget,
            seed=seed,
            bucket_bytes=bucket_bytes,
            collective_deadline_s=times.request_timeout_s,
        )
        specs.append(
            GroupSpec(
                settings=_of_actor(settings, actor, publish) if own is None else _of_critic(settings, own),
                critic=None if index < 0 else index,
                num_ranks=section.num_ranks,
                num_local_ranks=_local_ranks(section),
                devices=section.devices,
            )
        )
    return tuple(specs)


def learning_rate_of(section: ActorSection | CriticSection, training_steps: int) -> LearningRate:
    """Of a group in a run of so many training steps.

    Raises:
        ConfigError: it is to come down, and not after its rise.
    """
    try:
        return LearningRate(
            peak=section.learning_rate,
            warmup_steps=section.learning_rate_warmup_steps,
            final=section.final_learning_rate,
            curve=section.learning_rate_curve,
            schedule_steps=section.schedule_steps_in(training_steps),
            head_peak=section.head_learning_rate if isinstance(section, CriticSection) else None,
        )
    except ValueError as error:
        raise ConfigError(f"{'actor' if isinstance(section, ActorSection) else 'critic'}: {error}") from error


def _of_actor(settings: WorkerSettings, actor: ActorSection, publish: PublishedLora) -> WorkerSettings:
    return replace(
        settings,
        float32_head=actor.float32_head,
        ema_decay=actor.ema_decay,
        reference=_reference_of(actor),
        moving_reference=actor.reference == "ema",
        routing_replay=actor.routing_replay,
        publish=publish,
    )


def _of_critic(settings: WorkerSettings, critic: CriticSection) -> WorkerSettings:
    return replace(settings, frozen=critic.frozen, head_std=critic.head_std)


def _offload_of(section: ActorSection | CriticSection) -> Offload:
    offload = section.offload
    return Offload(
        optimizer=offload.optimizer,
        weights=offload.weights,
        pin_memory=offload.pin_memory,
    )


def _local_ranks(section: ActorSection | CriticSection) -> int:
    if section.local_ranks is None:
        return section.num_ranks
    return min(section.local_ranks, section.num_ranks)


def _reference_of(actor: ActorSection) -> str:
    """Folder of the model that the reference starts as; empty: none."""
    if actor.reference is None:
        return ""
    # A moving average starts at the initial weights.
    folder = actor.reference if isinstance(actor.reference, Path) else actor.model
    return str(folder.absolute())
