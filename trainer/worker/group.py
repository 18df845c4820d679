"""The coordinator's side of the worker groups: an actor and its critics, as objects with awaitable methods."""

import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from asyppo_async.concurrency import beside, together
from asyppo_async.config.critic import CriticSection
from asyppo_async.config.learner import PublishedLora
from asyppo_async.config.placement import PlacementSection
from asyppo_async.config.sections import ActorSection
from asyppo_async.errors import ConfigError, WorkerError
from asyppo_async.trainer.worker.clients import ActorGroup, CriticGroup
from asyppo_async.trainer.worker.codec import expect
from asyppo_async.trainer.worker.control import Assigned, Assignment, Load, Loaded
from asyppo_async.trainer.worker.devices import GroupPlaces, assign_devices, check_shared
from asyppo_async.trainer.worker.hub import Hub, open_hub
from asyppo_async.trainer.worker.processes import WorkerCommand, WorkerProcess, started_workers
from asyppo_async.trainer.worker.ranks import Ranks
from asyppo_async.trainer.worker.rendezvous import gather_workers, refuse_latecomers
from asyppo_async.trainer.worker.specs import GroupSpec, GroupTimes, specs_of
from asyppo_async.trainer.worker.turns import Turns
from asyppo_async.trainer.worker.wire import SHUTDOWN_GRACE_S, read_token

logger = logging.getLogger(__name__)

_EXIT_GRACE_S = SHUTDOWN_GRACE_S + 2
_SETTLE_S = 0.2
SPLIT = PlacementSection()
"""Groups that share nothing."""
_TOKEN_FILE = "worker.token"


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
    on_line: Callable[[str], None] = logger.info,
    training_steps: int = 0,
    publish: PublishedLora = "merged",
    placement: PlacementSection = SPLIT,
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
        on_line: told, where ranks of other machines are wanted, what to type there.
        training_steps: of the run, over which a learning rate comes down that names no steps of its own.
        publish: of an actor with adapters, all its weights or the adapters alone.
        placement: whether groups share devices.

    Raises:
        ConfigError: no such model, a critic with another vocabulary, an address that cannot be bound, no such device,
            or models that do not fit on one together.
        WorkerError: a worker is missing, or died.
    """
    specs = specs_of(
        actor,
        critic,
        seed=seed,
        bucket_bytes=bucket_bytes,
        times=times,
        training_steps=training_steps,
        publish=publish,
    )
    async with open_worker_groups(
        specs, folder=folder, times=times, bind=bind, on_line=on_line, placement=placement
    ) as groups:
        yield groups


@asynccontextmanager
async def open_worker_groups(
    specs: Sequence[GroupSpec],
    *,
    folder: Path,
    times: GroupTimes,
    bind: str,
    on_line: Callable[[str], None] = logger.info,
    placement: PlacementSection = SPLIT,
) -> AsyncIterator[tuple[ActorGroup, tuple[CriticGroup, ...]]]:
    """As `open_groups`, group by group: the actor's spec first."""
    async with _loaded_groups(
        specs, folder=folder, times=times, bind=bind, on_line=on_line, placement=placement
    ) as loaded:
        (actor_ranks, actor_loaded), *critics = loaded
        for spec, (_, critic) in zip(specs[1:], critics, strict=True):
            _check_vocabulary(specs[0], actor_loaded, spec, critic)
        assert actor_loaded.manifest is not None
        actor = ActorGroup(actor_ranks, actor_loaded.manifest, times.request_timeout_s)
        yield actor, _critic_groups([ranks for ranks, _ in critics], times)


@asynccontextmanager
async def _loaded_groups(
    specs: Sequence[GroupSpec],
    *,
    folder: Path,
    times: GroupTimes,
    bind: str,
    on_line: Callable[[str], None],
    placement: PlacementSection,
) -> AsyncIterator[list[tuple[Ranks, Loaded]]]:
    """The ranks of each group with their models loaded, until the body ends."""
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
        for line in _invitations(specs, hub.endpoint, token_file):
            on_line(line)
        try:
            groups = await _set_up(hub, specs, times, placement)
            async with beside(refuse_latecomers(hub)):
                yield groups
        finally:
            await hub.shut_down()


@asynccontextmanager
async def open_critic_groups(
    *,
    actor: ActorSection,
    critic: CriticSection,
    seed: int,
    folder: Path,
    times: GroupTimes,
    bind: str = "tcp://127.0.0.1:*",
    on_line: Callable[[str], None] = logger.info,
) -> AsyncIterator[tuple[CriticGroup, ...]]:
    """As `open_groups`, without an actor: for value pretraining over a pool."""
    specs = specs_of(actor, critic, seed=seed, bucket_bytes=1024, times=times)[1:]
    async with _loaded_groups(
        specs, folder=folder, times=times, bind=bind, on_line=on_line, placement=SPLIT
    ) as loaded:
        yield _critic_groups([ranks for ranks, _ in loaded], times)


def _critic_groups(all_ranks: Sequence[Ranks], times: GroupTimes) -> tuple[CriticGroup, ...]:
    return tuple(CriticGroup(ranks, times.request_timeout_s, index) for index, ranks in enumerate(all_ranks))


def write_token(folder: Path) -> Path:
    """The run's token for its workers, readable by this user only; kept if the run already has one."""
    file = folder / _TOKEN_FILE
    if not file.exists():
        file.touch(mode=0o600)
        file.write_text(secrets.token_hex(32), encoding="utf-8")
    return file


def _invitations(specs: Sequence[GroupSpec], endpoint: str, token_file: Path) -> list[str]:
    """What to type on other machines, one line per role whose ranks are not all started here."""
    lines = []
    for role in ("actor", "critic"):
        missing = sum(spec.num_ranks - spec.num_local_ranks for spec in specs if spec.settings.role == role)
        if missing:
            ranks = "1 rank" if missing == 1 else f"{missing} ranks"
            lines.append(
                f"waiting for {ranks} of role {role}: asyppo-train worker --role {role} "
                f"--connect {endpoint.removeprefix('tcp://')} --token-file {token_file}"
            )
    return lines


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
    hub: Hub, specs: Sequence[GroupSpec], times: GroupTimes, placement: PlacementSection
) -> list[tuple[Ranks, Loaded]]:
    gathered = await gather_workers(hub, [spec.wanted for spec in specs], times.join_timeout_s)
    shares = placement.mode == "colocated"
    turns = Turns(placement.moves, times.request_timeout_s) if shares else None
    all_ranks = [Ranks(spec.wanted.label, peers, turns) for spec, peers in zip(specs, gathered, strict=True)]
    places = [
        GroupPlaces(label=ranks.label, devices=spec.devices, hellos=ranks.hellos)
        for spec, ranks in zip(specs, all_ranks, strict=True)
    ]
    devices = assign_devices(places, share=shares)
    loaded = await together(
        *[
            _load(ranks, spec, of_ranks, times.join_timeout_s)
            for ranks, spec, of_ranks in zip(all_ranks, specs, devices, strict=True)
        ]
    )
    check_shared(
        {
            f"{ranks.label} rank {rank}": answer.footprint
            for ranks, answers in zip(all_ranks, loaded, strict=True)
            for rank, answer in enumerate(answers)
        },
        placement,
    )
    return [(ranks, answers[0]) for ranks, answers in zip(all_ranks, loaded, strict=True)]


async def _load(ranks: Ranks, spec: GroupSpec, devices: Sequence[str], timeout_s: float) -> list[Loaded]:
    """Give every rank its place, make their world, load the model."""
    assignments = [
        Assignment(
            rank=rank, world_size=ranks.size, critic=spec.critic, settings=spec.settings, device=device
        )
        for rank, device in enumerate(devices)
    ]
    assigned = expect((await ranks.ask(assignments, timeout_s))[0], Assigned)
    assert assigned.store is not None
    replies = await ranks.ask([Load(store=assigned.store)] * ranks.size, timeout_s)
    return [expect(reply, Loaded) for reply in replies]


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
