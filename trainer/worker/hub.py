"""The coordinator's end: one ROUTER for all ranks, who is alive, and which request is answered by what.

Nothing here waits without a deadline: a request has its own, and a rank that is silent too long fails everything that
waits for it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import zmq
import zmq.asyncio

from asyppo_async.concurrency import beside
from asyppo_async.errors import ConfigError, WorkerError
from asyppo_async.trainer.worker.codec import Envelope, Message, decode, encode
from asyppo_async.trainer.worker.control import Acknowledged, Failure, Heartbeat, Hello, Refused, Shutdown
from asyppo_async.trainer.worker.wire import (
    HEARTBEAT_INTERVAL_S,
    LINGER_MS,
    buffers_of,
    secure_coordinator,
)

logger = logging.getLogger(__name__)


class Pending:
    """A request that was sent to one rank."""

    def __init__(self, reply: "asyncio.Future[Message]") -> None:
        self.reply = reply
        self.acknowledged = False


class Peer:
    """One rank, as the coordinator sees it."""

    def __init__(self, hub: "Hub", identity: bytes, hello: Hello, silent_after_s: float) -> None:
        self._hub = hub
        self._identity = identity
        self._silent_after_s = silent_after_s
        self._pending: dict[int, Pending] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._warned = False
        self.hello = hello
        self.label = f"{hello.role} (process {hello.pid} on {hello.host})"
        self.failure: str | None = None
        """Why the rank is of no more use, in its own words if it had any."""
        self.died = False
        """Its process is known to have ended."""
        self._failed = asyncio.Event()
        self._group_failed = asyncio.Event()
        self.heard_s = time.monotonic()
        self.heard()

    def join_group(self, label: str, failed: asyncio.Event) -> None:
        """Take the name of a place in a group; `failed` is set when any rank of it is lost."""
        self.label = label
        self._group_failed = failed
        if self.failure is not None:
            failed.set()

    async def lost(self, why: str, settle_s: float) -> None:
        """The process is gone; what it said last may still be on its way and is the better reason."""
        self.died = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._failed.wait(), settle_s)
        self.fail(why)

    def heard(self) -> None:
        """The rank lives."""
        self.heard_s = time.monotonic()
        self._warned = False
        self._wait(max(self._silent_after_s - HEARTBEAT_INTERVAL_S, HEARTBEAT_INTERVAL_S))

    async def send(self, message: Message, deadline_s: float) -> Pending:
        """Send a request; its reply comes through the future, or `WorkerError` when the rank dies first.

        The arrays of `message` must not be written before the reply is there.
        """
        loop = asyncio.get_running_loop()
        pending = Pending(loop.create_future())
        if self.failure is not None:
            raise WorkerError(self.failure)
        request_id = self._hub.next_request_id()
        self._pending[request_id] = pending
        pending.reply.add_done_callback(lambda _: self._pending.pop(request_id, None))
        await self._hub.send(self, message, request_id=request_id, deadline_s=deadline_s)
        return pending

    async def tell(self, message: Message) -> None:
        """Send what has no answer."""
        await self._hub.send(self, message)

    def take(self, envelope: Envelope) -> None:
        """Deliver what the rank sent."""
        self.heard()
        message = envelope.message
        pending = self._pending.get(envelope.request_id)
        if isinstance(message, Failure) and message.fatal:
            self.fail(f"{self.label} failed: {message.kind}: {message.message}")
        elif pending is not None and isinstance(message, Acknowledged):
            pending.acknowledged = True
        elif pending is not None and not pending.reply.done():
            pending.reply.set_result(message)

    def fail(self, why: str) -> None:
        """Give the rank up; everything that waits for it gets `WorkerError`. The first reason stays."""
        if self.failure is None:
            self.failure = why
            self._failed.set()
            self._group_failed.set()
        for pending in list(self._pending.values()):
            if not pending.reply.done():
                pending.reply.set_exception(WorkerError(self.failure))
                pending.reply.exception()
        self.close()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def identity(self) -> bytes:
        return self._identity

    def _wait(self, seconds: float) -> None:
        self.close()
        if self.failure is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._on_silence)

    def _on_silence(self) -> None:
        # After a pause of this process the messages that came meanwhile are still unread: look a second time.
        if not self._warned:
            self._warned = True
            self._wait(HEARTBEAT_INTERVAL_S)
            return
        silent_s = time.monotonic() - self.heard_s
        self.fail(
            f"{self.label} was silent for {silent_s:.0f} s (its heartbeat is every 2 s): it is gone or cut off"
        )


class Hub:
    """Owns the socket. `joins` yields each rank once, after its hello, or why one will never come."""

    def __init__(self, socket: zmq.asyncio.Socket, endpoint: str, silent_after_s: float) -> None:
        self._socket = socket
        self._silent_after_s = silent_after_s
        self._peers: dict[bytes, Peer] = {}
        self._num_requests = 0
        self.endpoint = endpoint
        self.joins: asyncio.Queue[Peer | WorkerError] = asyncio.Queue()

    def next_request_id(self) -> int:
        self._num_requests += 1
        return self._num_requests

    def peer_named(self, name: str) -> Peer | None:
        """The rank of a process that the coordinator started under this name."""
        return next((peer for peer in self._peers.values() if peer.hello.name == name), None)

    async def send(
        self, peer: Peer, message: Message, *, request_id: int = 0, deadline_s: float = 0.0
    ) -> None:
        """Raises:
        WorkerError: there is no connection to the rank.
        """
        frames = encode(message, request_id=request_id, deadline_s=deadline_s)
        try:
            await self._socket.send_multipart([peer.identity, *frames], copy=False)
        except zmq.ZMQError as error:
            peer.fail(f"{peer.label} cannot be reached: {error}")
            raise WorkerError(f"{peer.label} cannot be reached: {error}") from error

    async def refuse(self, peer: Peer, reason: str) -> None:
        """Send a worker away."""
        logger.warning("%s is refused: %s", peer.label, reason)
        await peer.tell(Refused(reason=reason))
        peer.close()
        del self._peers[peer.identity]

    async def run(self) -> None:
        """Consumes the socket; produces joins and replies; ends by being cancelled."""
        while True:
            identity, *frames = await self._socket.recv_multipart(copy=False)
            try:
                envelope = decode(buffers_of(frames))
            except WorkerError as error:
                self._on_garbage(identity.bytes, error)
                continue
            peer = self._peers.get(identity.bytes)
            if isinstance(envelope.message, Hello) and peer is None:
                peer = Peer(self, identity.bytes, envelope.message, self._silent_after_s)
                self._peers[peer.identity] = peer
                self.joins.put_nowait(peer)
            elif peer is not None:
                peer.take(envelope)
                if isinstance(envelope.message, Heartbeat):
                    await self._answer_heartbeat(peer)

    async def shut_down(self) -> None:
        """Tell every rank to end."""
        for peer in self._peers.values():
            peer.close()
            if peer.failure is None:
                with suppress(WorkerError):  # it went first
                    await peer.tell(Shutdown())

    def _on_garbage(self, identity: bytes, error: WorkerError) -> None:
        peer = self._peers.get(identity)
        if peer is None:
            logger.warning("from a stranger: %s", error)
        else:
            peer.fail(f"{peer.label}: {error}")

    async def _answer_heartbeat(self, peer: Peer) -> None:
        try:
            await self._socket.send_multipart([peer.identity, *encode(Heartbeat())])
        except zmq.ZMQError:
            logger.info("%s went away before its heartbeat was answered", peer.label)


@asynccontextmanager
async def open_hub(bind: str, token: str, silent_after_s: float) -> AsyncIterator[Hub]:
    """Listen on `bind` (`tcp://host:port`, port `*` for a free one) and serve while the body runs.

    Raises:
        ConfigError: the address is not one of this machine, or in use.
    """
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    try:
        secure_coordinator(socket, token)
        socket.router_mandatory = True
        socket.router_handover = True
        socket.linger = LINGER_MS
        socket.sndhwm = socket.rcvhwm = 0
        try:
            socket.bind(bind)
        except zmq.ZMQError as error:
            raise ConfigError(f"workers cannot be listened for on {bind}: {error}") from error
        hub = Hub(socket, socket.getsockopt_string(zmq.LAST_ENDPOINT), silent_after_s)
        async with beside(hub.run()):
            yield hub
    finally:
        socket.close()
        await asyncio.to_thread(context.term)
