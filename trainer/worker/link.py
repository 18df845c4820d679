"""The worker's end of the connection: one thread owns the socket, beats and acknowledges, whatever the rank computes.

Two threads, two sockets: a ZMQ socket belongs to one thread, so the main thread speaks to this one over an in-process
pair. Both pass frames on without copying them.
"""

import logging
import os
import threading
import time
import uuid
from collections.abc import Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from asyppo_async.errors import WorkerError
from asyppo_async.trainer.worker.codec import Envelope, Message, decode, encode
from asyppo_async.trainer.worker.control import Acknowledged, Heartbeat, Hello, Shutdown
from asyppo_async.trainer.worker.wire import (
    ABANDONED_AFTER_S,
    HEARTBEAT_INTERVAL_S,
    LINGER_MS,
    SHUTDOWN_GRACE_S,
    buffers_of,
    secure_worker,
)

logger = logging.getLogger(__name__)

EXIT_ABANDONED = 3
EXIT_STUCK = 4
EXIT_REFUSED = 5
_REFUSALS = 3
"""Handshakes that fail one after the other before the rank believes it; one may fail because the run just ended."""
_HANDSHAKES = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_PAIR = "inproc://main-thread"


class Link:
    """What the main thread sees: requests come out, replies go in."""

    def __init__(
        self, endpoint: str, token: str, hello: Hello, *, abandoned_after_s: float = ABANDONED_AFTER_S
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pair = self._context.socket(zmq.PAIR)
        self._pair.linger = LINGER_MS
        self._pair.bind(_PAIR)
        self._thread = _Connection(self._context, endpoint, token, hello, abandoned_after_s)

    def start(self) -> None:
        """Connect and say hello."""
        self._thread.start()

    def receive(self) -> Envelope:
        """Wait for the next request. Not bounded here: the connection's thread ends the process of an abandoned rank.

        Raises:
            WorkerError: what arrived is not a message.
        """
        return decode(buffers_of(self._pair.recv_multipart(copy=False)))

    def reply(self, request: Envelope, message: Message) -> None:
        """Answer `request`. The arrays of the message must not be written any more."""
        self._pair.send_multipart(encode(message, request_id=request.request_id), copy=False)

    def close(self) -> None:
        """Send what is still to be sent, then let go."""
        self._pair.send_multipart([b""])
        self._thread.join(timeout=SHUTDOWN_GRACE_S)
        self._pair.close()
        self._context.term()


class _Connection(threading.Thread):
    """Consumes frames of the coordinator and replies of the main thread; produces heartbeats and acknowledgements."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        token: str,
        hello: Hello,
        abandoned_after_s: float,
    ) -> None:
        super().__init__(name="coordinator-link", daemon=True)
        self._context = context
        self._endpoint = endpoint
        self._token = token
        self._hello = hello
        self._abandoned_after_s = abandoned_after_s
        self._heard_s = 0.0
        self._end_at_s: float | None = None
        self._num_refusals = 0

    def run(self) -> None:
        finished = False
        try:
            with (
                self._context.socket(zmq.DEALER) as dealer,
                self._context.socket(zmq.PAIR) as pair,
                dealer.get_monitor_socket(_HANDSHAKES) as handshakes,
            ):
                self._open(dealer, pair)
                self._loop(dealer, pair, handshakes)
                dealer.disable_monitor()
            finished = True
        finally:
            if not finished:  # the main thread may be deep in a collective: nothing else ends it
                os._exit(EXIT_STUCK)

    def _open(self, dealer: "zmq.Socket[bytes]", pair: "zmq.Socket[bytes]") -> None:
        secure_worker(dealer, self._token)
        dealer.routing_id = uuid.uuid4().bytes
        dealer.sndhwm = dealer.rcvhwm = 0
        dealer.linger = LINGER_MS
        dealer.connect(self._endpoint)
        pair.connect(_PAIR)
        self._heard_s = time.monotonic()
        dealer.send_multipart(encode(self._hello))

    def _loop(
        self, dealer: "zmq.Socket[bytes]", pair: "zmq.Socket[bytes]", handshakes: "zmq.Socket[bytes]"
    ) -> None:
        poller = zmq.Poller()
        poller.register(handshakes, zmq.POLLIN)
        poller.register(dealer, zmq.POLLIN)
        poller.register(pair, zmq.POLLIN)
        next_beat_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            if now_s >= next_beat_s:
                dealer.send_multipart(encode(Heartbeat()))
                next_beat_s = now_s + HEARTBEAT_INTERVAL_S
            self._end_if_abandoned(now_s)
            ready = dict(poller.poll(max(0, round((next_beat_s - now_s) * 1000))))
            if handshakes in ready:
                self._end_if_refused(parse_monitor_message(handshakes.recv_multipart())["event"])
            if pair in ready:
                frames = pair.recv_multipart(copy=False)
                if len(frames[0]) == 0:
                    return
                dealer.send_multipart(frames, copy=False)
            if dealer in ready:
                self._heard_s = time.monotonic()
                self._take(dealer.recv_multipart(copy=False), dealer, pair)

    def _take(
        self, frames: Sequence[zmq.Frame], dealer: "zmq.Socket[bytes]", pair: "zmq.Socket[bytes]"
    ) -> None:
        try:
            envelope = decode(buffers_of(frames))
        except WorkerError as error:
            logger.error("%s", error)
            return
        if isinstance(envelope.message, Heartbeat):
            return
        if isinstance(envelope.message, Shutdown):
            self._end_at_s = time.monotonic() + SHUTDOWN_GRACE_S
        else:
            dealer.send_multipart(encode(Acknowledged(), request_id=envelope.request_id))
        pair.send_multipart(frames, copy=False)

    def _end_if_refused(self, event: int) -> None:
        self._num_refusals = 0 if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else self._num_refusals + 1
        if self._num_refusals == _REFUSALS:
            logger.error(
                "the coordinator at %s turns this worker away: the token is not that of the run (see --token-file), "
                "or what listens there is no run",
                self._endpoint,
            )
            os._exit(EXIT_REFUSED)

    def _end_if_abandoned(self, now_s: float) -> None:
        if self._end_at_s is not None and now_s > self._end_at_s:
            logger.error("told to end %.0f s ago and still computing: ending the process", SHUTDOWN_GRACE_S)
            os._exit(EXIT_STUCK)
        silent_s = now_s - self._heard_s
        if silent_s > self._abandoned_after_s:
            logger.error(
                "no word from the coordinator at %s for %.0f s (gone, wrong address or wrong token): ending",
                self._endpoint,
                silent_s,
            )
            os._exit(EXIT_ABANDONED)
