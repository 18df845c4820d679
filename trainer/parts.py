"""Starts what a run consists of, everything at the same time, and ends it in order."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from asyppo_async.config.sections import TrainConfig
from asyppo_async.rpc.security import client_security
from asyppo_async.trainer.coordinator.connecting import connect
from asyppo_async.trainer.coordinator.cut import Restored
from asyppo_async.trainer.coordinator.joins import first_caller, open_joins
from asyppo_async.trainer.coordinator.membership import Fleet, RunIdentity
from asyppo_async.trainer.coordinator.parties import all_parties
from asyppo_async.trainer.coordinator.probing import plan_probe
from asyppo_async.trainer.coordinator.publish import Publisher, open_publisher
from asyppo_async.trainer.coordinator.rewards import RewardPool
from asyppo_async.trainer.coordinator.server_check import Expected
from asyppo_async.trainer.material import Material
from asyppo_async.trainer.run_folder import RunFolder
from asyppo_async.trainer.servers import Servers
from asyppo_async.trainer.worker.clients import ActorGroup, CriticGroup
from asyppo_async.trainer.worker.group import open_groups
from asyppo_async.trainer.worker.specs import GroupTimes

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a run has started."""

    actor: ActorGroup
    critics: tuple[CriticGroup, ...]
    fleet: Fleet
    publisher: Publisher
    rewards: RewardPool


@asynccontextmanager
async def open_parts(
    config: TrainConfig,
    material: Material,
    folder: RunFolder,
    servers: Servers,
    run: RunIdentity,
    on_phase: Callable[[str], None],
    on_line: Callable[[str], None],
    restored: Restored | None = None,
) -> AsyncIterator[Parts]:
    """Worker groups, fleet and reward processes start side by side; then the weight session joins them.

    Args:
        config: Of the run.
        material: Of the run.
        folder: Of the run.
        servers: That live longer than these parts.
        run: How the servers tell this life of the run from others.
        on_phase: Told what is being done.
        on_line: Told what a person has to do elsewhere.
        restored: What the groups go on from, and the version that is published first; None: the initial weights.

    Raises:
        AsyppoError: Within an exception group; the part's own words.
    """
    on_phase("starting the worker groups and the fleet")
    version = 0 if restored is None else restored.state.core.version
    rewards = RewardPool(
        specs=material.specs,
        num_children=config.task.reward_processes,
        score_deadline_s=config.task.reward_timeout_s,
        memory_bytes=config.task.reward_memory_bytes,
        start_deadline_s=config.run.join_timeout_s,
    )
    async with asyncio.TaskGroup() as tasks:
        release = asyncio.Event()
        checkpoint = None if restored is None else restored.folder
        held_groups = _Held(tasks, open_run_groups(config, folder.path, on_line, checkpoint), release)
        held_fleet = _Held(tasks, _open_fleet(config, material, servers, run), release)
        held_rewards = _Held(tasks, rewards, release)
        try:
            actor, critics = await held_groups.value
            fleet = await held_fleet.value
            on_phase(f"publishing the weights of version {version}")
            async with _open_publisher(config, material, fleet, actor, version) as publisher:
                yield Parts(
                    actor=actor,
                    critics=critics,
                    fleet=fleet,
                    publisher=publisher,
                    rewards=await held_rewards.value,
                )
        finally:
            release.set()
            await asyncio.wait([held_groups.task, held_fleet.task, held_rewards.task])


@asynccontextmanager
async def open_parts_once(
    config: TrainConfig,
    material: Material,
    folder: RunFolder,
    on_phase: Callable[[str], None],
    on_line: Callable[[str], None],
) -> AsyncIterator[Parts]:
    """`open_parts` for what is never resumed: an evaluation, a collection of responses, a pretraining."""
    identity = RunIdentity(run_id=f"{config.run.name}-{secrets.token_hex(4)}", incarnation=0)
    async with (
        Servers(config, folder) as servers,
        open_parts(config, material, folder, servers, identity, on_phase, on_line) as parts,
    ):
        yield parts


class _Held(Generic[T]):
    """A context that a task of its own enters and leaves.

    What opens with task groups of its own must be left by the task that entered it, so contexts that are to open
    side by side need a task each.
    """

    def __init__(
        self, tasks: asyncio.TaskGroup, context: AbstractAsyncContextManager[T], release: asyncio.Event
    ) -> None:
        self.value: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.task = tasks.create_task(self._hold(context, release))

    async def _hold(self, context: AbstractAsyncContextManager[T], release: asyncio.Event) -> None:
        try:
            async with context as value:
                self.value.set_result(value)
                await release.wait()
        finally:
            self.value.cancel()


@asynccontextmanager
async def open_run_groups(
    config: TrainConfig,
    folder: Path,
    on_line: Callable[[str], None],
    checkpoint: Path | None,
    *,
    average: bool = False,
) -> AsyncIterator[tuple[ActorGroup, tuple[CriticGroup, ...]]]:
    """The worker groups of a run.

    Args:
        config: Of the run.
        folder: For their logs and the workers' token.
        on_line: Told what a person has to do elsewhere.
        checkpoint: What they go on from; None: the initial weights.
        average: The actor gets the moving average of its weights in their place.
    """
    times = GroupTimes(
        join_timeout_s=config.run.join_timeout_s,
        request_timeout_s=config.run.request_timeout_s,
        silent_after_s=config.run.silent_after_s,
    )
    async with open_groups(
        actor=config.actor,
        critic=config.critic,
        seed=config.run.seed,
        bucket_bytes=config.weights.bucket_bytes,
        folder=folder,
        times=times,
        bind=f"tcp://{config.run.worker_host}:{config.run.worker_port or '*'}",
        on_line=on_line,
        training_steps=config.run.num_steps,
        publish=config.weights.lora,
        placement=config.placement,
    ) as (actor, critics):
        if checkpoint is not None:
            await all_parties(
                [
                    actor.state.restore(checkpoint, average=average),
                    *(critic.state.restore(checkpoint) for critic in critics),
                ]
            )
        yield actor, critics


@asynccontextmanager
async def _open_fleet(
    config: TrainConfig, material: Material, servers: Servers, run: RunIdentity
) -> AsyncIterator[Fleet]:
    security = client_security()
    if config.fleet.servers or config.fleet.listen:
        security = client_security(
            token_file=config.fleet.token_file,
            ca_file=config.fleet.tls_ca,
            certificate_file=config.fleet.tls_cert,
            key_file=config.fleet.tls_key,
        )
    async with open_joins(config.fleet, run.run_id, security) as joins:
        if joins is not None and not config.fleet.servers:
            addresses: tuple[str, ...] = (await first_caller(joins, config.run.join_timeout_s),)
        else:
            addresses = await servers.addresses()
        async with connect(
            addresses,
            expected_of(config, material),
            run,
            config.run.join_timeout_s,
            security,
            silence_s=config.fleet.silence_s,
            joins=joins,
            debug=config.run.debug,
        ) as fleet:
            yield fleet


def expected_of(config: TrainConfig, material: Material) -> Expected:
    """What every server of a run must have in common with its trainer."""
    return Expected(
        identity=material.identity,
        dtype=config.actor.dtype,
        float32_head=config.actor.float32_head,
        longest_tokens=material.longest_tokens,
        routed_experts=config.actor.routing_replay,
    )


def _open_publisher(
    config: TrainConfig, material: Material, fleet: Fleet, actor: ActorGroup, version: int
) -> AbstractAsyncContextManager[Publisher]:
    return open_publisher(
        sender=actor,
        fleet=fleet,
        settings=config.weights,
        plan=plan_probe(
            prompts=[prompt.token_ids for prompt in material.heldout],
            sampling=material.sampling,
            vocab_size=material.identity.vocab_size,
            max_model_len=min(member.info.max_model_len for member in fleet.members),
            longest_tokens=material.longest_tokens,
            num_sequences=config.weights.num_probe_sequences,
            num_tokens=config.weights.probe_tokens,
            seed=config.run.seed,
        ),
        host=fleet.address_of_this_host(),
        version=version,
    )
