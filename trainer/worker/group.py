"""The coordinator's side of the worker groups: an actor and its critics, as objects with awaitable methods."""

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from asyppo_async.config.sections import ActorSection, CriticSection
from asyppo_async.errors import ConfigError, WorkerError
from asyppo_async.trainer.worker.clients import ActorGroup, CriticGroup
from asyppo_async.trainer.worker.codec import expect
from asyppo_async.trainer.worker.concurrency import beside, together
from asyppo_async.trainer.worker.control import Assigned, Assignment, Load, Loaded, WorkerSettings
from asyppo_async.trainer.worker.hub import Hub, open_hub
from asyppo_async.trainer.worker.processes import WorkerCommand, WorkerProcess, started_workers
from asyppo_async.trainer.worker.ranks import Ranks
from asyppo_async.trainer.worker.rendezvous import WantedGroup, gather_workers, refuse_latecomers
from asyppo_async.trainer.worker.wire import SHUTDOWN_GRACE_S, read_token

_EXIT_GRACE_S = SHUTDOWN_GRACE_S + 2
_SETTLE_S = 0.2
_TOKEN_FILE = "worker.token"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """One group: what it is and how many of its ranks are started here; the others join by themselves."""

    settings: WorkerSettings
    critic: int | None
    num_ranks: int
    num_local_ranks: int

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


@asynccontextmanager
async def open_groups(
    *,
    actor: ActorSection,
    critic: CriticSection,
    seed: int,
    bucket_bytes: int,
    folder: Path,
    times: GroupTimes,
    bind: str = "tcp://127.0.0.1:*",
) -> AsyncIterator[tuple[ActorGroup, tuple[CriticGroup, ...]]]:
    """Start the worker groups of a run on this machine, and end them with the body.

    Args:
        actor: model, optimizer, ranks.
        critic: likewise; `count` groups are made of it.
        seed: of the value heads.
        bucket_bytes: of a publication.
        folder: of the run; the token file and one log per process are written there.
        times: how long to wait.
        bind: where workers connect.

    Raises:
        ConfigError: no such model, a critic with another vocabulary, or an address that cannot be bound.
        WorkerError: a worker is missing, or died.
    """
    specs = specs_of(actor, critic, seed=seed, bucket_bytes=bucket_bytes, times=times)
    async with open_worker_groups(specs, folder=folder, times=times, bind=bind) as groups:
        yield groups


def specs_of(
    actor: ActorSection, critic: CriticSection, *, seed: int, bucket_bytes: int, times: GroupTimes
) -> tuple[GroupSpec, ...]:
    """The actor's group first, then one per critic."""
    specs = []
    for index in range(-1, critic.count):
        section = actor if index < 0 else critic
        if section.model is None:
            raise ConfigError(f"critic.model is missing, and critic.count is {critic.count}")
        settings = WorkerSettings(
            role="actor" if index < 0 else "critic",
            model=str(section.model.absolute()),
            dtype=section.dtype,
            backend=section.backend,
            learning_rate=section.learning_rate,
            weight_decay=section.weight_decay,
            warmup_steps=section.warmup_steps,
            max_grad_norm=section.max_grad_norm,
            micro_batch_tokens=section.micro_batch_tokens,
            num_threads=section.num_threads,
            non_finite_budget=section.non_finite_budget,
            seed=seed,
            bucket_bytes=bucket_bytes,
            collective_deadline_s=times.request_timeout_s,
        )
        specs.append(
            GroupSpec(
                settings=settings,
                critic=None if index < 0 else index,
                num_ranks=section.num_ranks,
                num_local_ranks=section.num_ranks,
            )
        )
    return tuple(specs)


@asynccontextmanager
async def open_worker_groups(
    specs: Sequence[GroupSpec], *, folder: Path, times: GroupTimes, bind: str
) -> AsyncIterator[tuple[ActorGroup, tuple[CriticGroup, ...]]]:
    """As `open_groups`, group by group: the actor's spec first."""
    logs = folder / "workers"
    logs.mkdir(parents=True, exist_ok=True)
    token_file = write_token(folder)
    commands = [command for spec in specs for command in _commands(spec)]
    async with (
        open_hub(bind, read_token(token_file), times.silent_after_s) as hub,
        started_workers(
            commands, endpoint=hub.endpoint, token_file=token_file, log_folder=logs, grace_s=_EXIT_GRACE_S
        ) as workers,
        beside(*[_report_loss(hub, worker) for worker in workers]),
    ):
        try:
            groups = await _set_up(hub, specs, times)
            async with beside(refuse_latecomers(hub)):
                yield groups
        finally:
            await hub.shut_down()


def write_token(folder: Path) -> Path:
    """The run's token for its workers, readable by this user only; kept if the run already has one."""
    file = folder / _TOKEN_FILE
    if not file.exists():
        file.touch(mode=0o600)
        file.write_text(secrets.token_hex(32), encoding="utf-8")
    return file


def _commands(spec: GroupSpec) -> list[WorkerCommand]:
    base = spec.wanted.label.replace(" ", "-")
    return [
        WorkerCommand(
            name=f"{base}-{index}",
            role=spec.settings.role,
            critic=spec.critic,
            num_threads=spec.settings.num_threads,
        )
        for index in range(spec.num_local_ranks)
    ]


async def _report_loss(hub: Hub, worker: WorkerProcess) -> None:
    """Consumes the end of one local process; produces the failure of its rank, or of the rendezvous."""
    how = await worker.wait()
    peer = hub.peer_named(worker.command.name)
    if peer is None:
        name = worker.command.name
        hub.joins.put_nowait(WorkerError(f"worker {name} {how}"))
    else:
        await peer.lost(f"{peer.label} {how}", _SETTLE_S)


async def _set_up(
    hub: Hub, specs: Sequence[GroupSpec], times: GroupTimes
) -> tuple[ActorGroup, tuple[CriticGroup, ...]]:
    gathered = await gather_workers(hub, [spec.wanted for spec in specs], times.join_timeout_s)
    all_ranks = [Ranks(spec.wanted.label, peers) for spec, peers in zip(specs, gathered, strict=True)]
    loaded = await together(
        *[_load(ranks, spec, times.join_timeout_s) for ranks, spec in zip(all_ranks, specs, strict=True)]
    )
    for spec, critic in zip(specs[1:], loaded[1:], strict=True):
        _check_vocabulary(specs[0], loaded[0], spec, critic)
    manifest = loaded[0].manifest
    assert manifest is not None
    actor = ActorGroup(all_ranks[0], manifest, times.request_timeout_s)
    return actor, tuple(CriticGroup(ranks, times.request_timeout_s) for ranks in all_ranks[1:])


async def _load(ranks: Ranks, spec: GroupSpec, timeout_s: float) -> Loaded:
    """Give every rank its place, make their world, load the model."""
    assignments = [
        Assignment(rank=rank, world_size=ranks.size, critic=spec.critic, settings=spec.settings)
        for rank in range(ranks.size)
    ]
    assigned = expect((await ranks.ask(assignments, timeout_s))[0], Assigned)
    assert assigned.store is not None
    replies = await ranks.ask([Load(store=assigned.store)] * ranks.size, timeout_s)
    return expect(replies[0], Loaded)


def _check_vocabulary(actor_spec: GroupSpec, actor: Loaded, critic_spec: GroupSpec, critic: Loaded) -> None:
    """The same tokenizer (embeddings may be padded to other sizes), or where one is unknown the same size."""
    fingerprints = {actor.tokenizer_fingerprint, critic.tokenizer_fingerprint}
    unknown = "" in fingerprints
    if (unknown and actor.vocab_size != critic.vocab_size) or (not unknown and len(fingerprints) > 1):
        raise ConfigError(
            f"{critic_spec.wanted.label} has another vocabulary than the actor: {critic_spec.settings.model} "
            f"({critic.vocab_size} tokens, tokenizer {critic.tokenizer_fingerprint[:12] or 'unknown'}), "
            f"{actor_spec.settings.model} ({actor.vocab_size} tokens, tokenizer "
            f"{actor.tokenizer_fingerprint[:12] or 'unknown'}); critic.model must read the actor's token ids"
        )
