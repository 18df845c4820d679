"""The process group between actor rank 0 and every server, for as long as a run publishes over it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Literal, Protocol

from asyppo_async.config.sections import WeightsSection
from asyppo_async.errors import AsyppoError, FleetError, WeightSyncError, WorkerError
from asyppo_async.rpc.calls import SessionPlace
from asyppo_async.trainer.coordinator.membership import Fleet
from asyppo_async.trainer.coordinator.together import beside
from asyppo_async.trainer.worker.messages import ActorForward, ActorForwardResult, SendResult, SessionStore
from asyppo_async.weights.manifest import Manifest

_log = logging.getLogger(__name__)

EPOCH = 1
"""Of the one session of an incarnation; it grows with every rebuild of the group."""
CLOSE_DEADLINE_S = 5.0
"""For each party of a session that is being left."""


class WeightSender(Protocol):
    """The actor group, as a publication sees it."""

    async def manifest(self) -> Manifest: ...

    async def open_session(
        self, *, host: str, epoch: int, world_size: int, backend: Literal["gloo", "nccl"], deadline_s: float
    ) -> SessionStore:
        """Start the store at rank 0; the others are told where it listens."""
        ...

    async def join_session(self, *, epoch: int, deadline_s: float) -> None:
        """Returns when all ranks of the session have met."""
        ...

    async def send_weights(self, version: int, deadline_s: float) -> SendResult: ...

    async def forward(self, request: ActorForward) -> ActorForwardResult: ...

    async def close_session(self) -> None: ...


@asynccontextmanager
async def weight_session(
    sender: WeightSender, fleet: Fleet, settings: WeightsSection, manifest: Manifest, host: str
) -> AsyncIterator[None]:
    """Open the session at both ends and close it when the block is left.

    Raises:
        WeightSyncError: a server has other tensors, or did not join in time.
    """
    try:
        with phase("open", None):
            await _join(sender, fleet, settings, manifest, host)
        yield
    finally:
        await _leave(sender, fleet)


@contextmanager
def phase(name: str, version: int | None) -> Iterator[None]:
    """Say in the error what was being done, once: the innermost phase counts."""
    try:
        yield
    except _PhaseFailed:
        raise
    except (FleetError, WorkerError, WeightSyncError) as error:
        what = "weight session" if version is None else f"publication of version {version}"
        raise _PhaseFailed(f"{what}: phase {name}: {error}") from error


class _PhaseFailed(WeightSyncError):
    """An error that says already in which phase."""


async def _join(
    sender: WeightSender, fleet: Fleet, settings: WeightsSection, manifest: Manifest, host: str
) -> None:
    deadline_s = settings.min_deadline_s
    world_size = len(fleet.members) + 1
    store = await sender.open_session(
        host=host, epoch=EPOCH, world_size=world_size, backend=settings.backend, deadline_s=deadline_s
    )
    places = [
        SessionPlace(
            run_id=fleet.run.run_id,
            incarnation=fleet.run.incarnation,
            epoch=EPOCH,
            rank=rank,
            world_size=world_size,
            backend=settings.backend,
            store_host=store.host,
            store_port=store.port,
            bucket_bytes=settings.bucket_bytes,
            lease_s=settings.lease_s,
        )
        for rank in range(1, world_size)
    ]
    await beside(
        sender.join_session(epoch=EPOCH, deadline_s=deadline_s),
        [
            member.client.open_session(place, manifest, deadline_s)
            for member, place in zip(fleet.members, places, strict=True)
        ],
    )


async def _leave(sender: WeightSender, fleet: Fleet) -> None:
    """Close both ends, as far as they still answer."""
    closings: list[Callable[[], Coroutine[object, object, None]]] = [
        *(partial(member.client.close_session, EPOCH, CLOSE_DEADLINE_S) for member in fleet.members),
        sender.close_session,
    ]
    for close in closings:
        try:
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                await close()
        except (AsyppoError, TimeoutError) as error:
            _log.warning("the weight session was not closed cleanly: %s", error)
