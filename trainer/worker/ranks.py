"""The ranks of one group as one partner: one request in flight, one answer per rank, or one error for all."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from asyppo_async.errors import AsyppoError, CheckpointError, TrainingDiverged, WeightSyncError, WorkerError
from asyppo_async.trainer.worker.codec import Message
from asyppo_async.trainer.worker.control import Assignment, Failure, Hello, SeeFolder
from asyppo_async.trainer.worker.hub import Peer, Pending
from asyppo_async.trainer.worker.session_messages import CloseSession, JoinSession, OpenSession
from asyppo_async.trainer.worker.turns import Turns

_SETTLE_S = 1.5
"""After the first failure, how long to collect the others: the cause often comes second (a killed rank is noticed
after its peers have complained about the broken connection)."""
_WITHOUT_DEVICE = (Assignment, SeeFolder, OpenSession, JoinSession, CloseSession)
"""Requests that compute nothing, so they need no turn."""
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_REPORTED: dict[str, type[AsyppoError]] = {
    kind.__name__: kind for kind in (WeightSyncError, TrainingDiverged, CheckpointError)
}


class Ranks:
    """Peers in rank order. A group that has failed stays failed."""

    def __init__(self, label: str, peers: Sequence[Peer], turns: Turns | None = None) -> None:
        """`turns`: of the groups that share devices; None: each has its own."""
        self._label = label
        self._turns = turns
        self._peers = tuple(peers)
        self._lock = asyncio.Lock()
        self._failed = asyncio.Event()
        for rank, peer in enumerate(self._peers):
            peer.join_group(
                f"{label} rank {rank} (process {peer.hello.pid} on {peer.hello.host})", self._failed
            )

    @property
    def label(self) -> str:
        return self._label

    @property
    def hellos(self) -> tuple[Hello, ...]:
        return tuple(peer.hello for peer in self._peers)

    @property
    def size(self) -> int:
        return len(self._peers)

    @property
    def labels(self) -> tuple[str, ...]:
        """Role, rank, process and host of each."""
        return tuple(peer.label for peer in self._peers)

    @property
    def first_elsewhere(self) -> str | None:
        """Address of rank 0 on another machine than the coordinator's; None where it is on the same one."""
        hello = self._peers[0].hello
        return None if hello.name or hello.host in _LOOPBACK else hello.host

    async def ask(self, requests: Sequence[Message], deadline_s: float) -> list[Message]:
        """Send request r to rank r and wait for every answer; fewer requests than ranks leave the last ranks out.

        Raises:
            WorkerError: a rank died, was silent, failed or missed the deadline; the group is of no more use.
            WeightSyncError, TrainingDiverged, CheckpointError: as the ranks report them; the group goes on.
        """
        if isinstance(requests[0], _WITHOUT_DEVICE):
            return await self._exchange(requests, deadline_s)
        # The turn first: whoever has it may ask this group to make room, and that must not wait for a request which
        # itself waits for the turn.
        async with self.on_device():
            return await self._exchange(requests, deadline_s)

    def on_device(self) -> AbstractAsyncContextManager[None]:
        """Within, no other group computes on devices that this one shares; it may be entered again within."""
        return nullcontext() if self._turns is None else self._turns.take(self)

    async def tell_all(self, request: Message, deadline_s: float) -> None:
        """Have every rank do what has no result, out of turn; raises as `ask`."""
        await self._exchange([request] * self.size, deadline_s)

    async def _exchange(self, requests: Sequence[Message], deadline_s: float) -> list[Message]:
        async with self._lock:
            self.raise_if_failed()
            pending = [
                await peer.send(request, deadline_s)
                for peer, request in zip(self._peers, requests, strict=False)
            ]
            replies = [request.reply for request in pending]
            _, late = await asyncio.wait(replies, timeout=deadline_s, return_when=asyncio.FIRST_EXCEPTION)
            if late and not self._failed.is_set():
                self._give_up_late(type(requests[0]).__name__, pending, deadline_s)
            elif late:
                await asyncio.wait(late, timeout=_SETTLE_S)
            self.raise_if_failed()
        messages = [reply.result() for reply in replies]
        for message in messages:
            if isinstance(message, Failure):
                kind = _REPORTED.get(message.kind, WorkerError)
                raise kind(f"{self._label}: {message.message}")
        return messages

    async def watch(self) -> None:
        """Wait until a rank is lost, whether or not a request is in flight, and raise `WorkerError`; never returns."""
        await self._failed.wait()
        await asyncio.sleep(_SETTLE_S)
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raise `WorkerError` with the reasons of all lost ranks, those first whose process has ended."""
        lost = sorted(
            (peer for peer in self._peers if peer.failure is not None), key=lambda peer: not peer.died
        )
        if lost:
            raise WorkerError("; ".join(peer.failure or "" for peer in lost))

    def _give_up_late(self, what: str, pending: Sequence[Pending], deadline_s: float) -> None:
        for peer, request in zip(self._peers, pending, strict=False):
            if not request.reply.done():
                state = "acknowledged" if request.acknowledged else "not acknowledged"
                silent_s = time.monotonic() - peer.heard_s
                peer.fail(
                    f"{peer.label} did not finish {what} within {deadline_s:g} s "
                    f"({state}, last heard {silent_s:.1f} s ago)"
                )
