"""Who takes part: waits for the configured number of ranks per role and gives each its place."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyppo_async.errors import WorkerError
from asyppo_async.trainer.worker.control import WorkerRole
from asyppo_async.trainer.worker.hub import Hub, Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedGroup:
    role: WorkerRole
    critic: int | None
    """None for the actor."""
    num_ranks: int

    @property
    def label(self) -> str:
        return self.role if self.critic is None else f"{self.role} {self.critic}"


@dataclass(slots=True)
class _Place:
    wanted: WantedGroup
    peers: list[Peer] = field(default_factory=list)

    def takes(self, peer: Peer) -> bool:
        if peer.hello.role != self.wanted.role or len(self.peers) == self.wanted.num_ranks:
            return False
        return peer.hello.critic in (None, self.wanted.critic)

    def forget_lost(self) -> None:
        self.peers = [peer for peer in self.peers if peer.failure is None]

    @property
    def complete(self) -> bool:
        return len(self.peers) == self.wanted.num_ranks


async def gather_workers(hub: Hub, groups: Sequence[WantedGroup], timeout_s: float) -> list[tuple[Peer, ...]]:
    """Wait until every group is complete; ranks of this machine come first, then those that joined earlier.

    A worker that names its critic goes there, the others fill the groups in order; one too many is sent away.

    Raises:
        WorkerError: time is up, with role, wanted and present; or a process that was started here has died.
    """
    places = [_Place(group) for group in groups]
    deadline_at_s = time.monotonic() + timeout_s
    while not all(place.complete for place in places):
        try:
            joined = await asyncio.wait_for(hub.joins.get(), deadline_at_s - time.monotonic())
        except TimeoutError:
            raise WorkerError(_missing(places, timeout_s)) from None
        if isinstance(joined, WorkerError):
            raise joined
        for place in places:
            place.forget_lost()
        taken = next((place for place in places if place.takes(joined)), None)
        if taken is None:
            await hub.refuse(joined, _no_place(joined, groups))
        else:
            taken.peers.append(joined)
    # Rank 0 publishes and saves, so it is best on the coordinator's own machine.
    return [tuple(sorted(place.peers, key=lambda peer: not peer.hello.name)) for place in places]


async def refuse_latecomers(hub: Hub) -> None:
    """Consumes joins after the groups are complete; ends by being cancelled."""
    while True:
        joined = await hub.joins.get()
        if isinstance(joined, Peer):
            await hub.refuse(joined, "the groups of this run are complete")


def _missing(places: Sequence[_Place], timeout_s: float) -> str:
    counts = "; ".join(
        f"{place.wanted.label}: wanted {place.wanted.num_ranks}, present {len(place.peers)}"
        for place in places
    )
    return f"not all workers joined within {timeout_s:g} s (run.join_timeout_s): {counts}"


def _no_place(peer: Peer, groups: Sequence[WantedGroup]) -> str:
    hello = peer.hello
    same = [group for group in groups if group.role == hello.role]
    if hello.critic is not None and hello.critic not in [group.critic for group in same]:
        return f"this run has no critic {hello.critic}; it has {len(same)}, counted from 0"
    return f"this run has all the {hello.role} ranks that it wants ({sum(group.num_ranks for group in same)})"
