"""Starts what a run consists of, everything at the same time, and ends it in order."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from asyppo_async.config.sections import TrainConfig
from asyppo_async.trainer.coordinator.embedded_fleet import embedded_fleet
from asyppo_async.trainer.coordinator.membership import Expected, Fleet, RunIdentity, connect
from asyppo_async.trainer.coordinator.probing import plan_probe
from asyppo_async.trainer.coordinator.publish import Publisher, open_publisher
from asyppo_async.trainer.coordinator.rewards import RewardPool
from asyppo_async.trainer.material import Material
from asyppo_async.trainer.run_folder import RunFolder
from asyppo_async.trainer.worker.clients import ActorGroup, CriticGroup
from asyppo_async.trainer.worker.group import GroupTimes, open_groups

T = TypeVar("T")

SILENT_AFTER_S = 30.0
"""A worker rank that sends no heartbeat for so long is lost."""


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
    run: RunIdentity,
    on_phase: Callable[[str], None],
) -> AsyncIterator[Parts]:
    """Worker groups, fleet and reward processes start side by side; then the weight session joins them.

    Raises:
        AsyppoError: Within an exception group; the part's own words.
    """
    on_phase("starting the worker groups and the fleet")
    times = GroupTimes(
        join_timeout_s=config.run.join_timeout_s,
        request_timeout_s=config.run.request_timeout_s,
        silent_after_s=SILENT_AFTER_S,
    )
    groups = open_groups(
        actor=config.actor,
        critic=config.critic,
        seed=config.run.seed,
        bucket_bytes=config.weights.bucket_bytes,
        folder=folder.path,
        times=times,
    )
    rewards = RewardPool(
        spec=material.task,
        num_children=config.task.reward_processes,
        score_deadline_s=config.task.reward_timeout_s,
        start_deadline_s=config.run.join_timeout_s,
    )
    async with asyncio.TaskGroup() as tasks:
        release = asyncio.Event()
        held_groups = _Held(tasks, groups, release)
        held_fleet = _Held(tasks, _open_fleet(config, material, folder, run), release)
        held_rewards = _Held(tasks, rewards, release)
        try:
            actor, critics = await held_groups.value
            fleet = await held_fleet.value
            on_phase("publishing the initial weights")
            async with _open_publisher(config, material, fleet, actor) as publisher:
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
async def _open_fleet(
    config: TrainConfig, material: Material, folder: RunFolder, run: RunIdentity
) -> AsyncIterator[Fleet]:
    expected = Expected(
        identity=material.identity, dtype=config.actor.dtype, longest_tokens=material.longest_tokens
    )
    if config.fleet.servers:
        async with connect(config.fleet.servers, expected, run, config.run.join_timeout_s) as fleet:
            yield fleet
        return
    async with (
        embedded_fleet(config, folder.logs) as address,
        connect([address], expected, run, config.run.join_timeout_s) as fleet,
    ):
        yield fleet


def _open_publisher(
    config: TrainConfig, material: Material, fleet: Fleet, actor: ActorGroup
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
            num_sequences=config.weights.num_probe_sequences,
            num_tokens=config.weights.probe_tokens,
            seed=config.run.seed,
        ),
        host=fleet.address_of_this_host(),
        version=0,
    )
