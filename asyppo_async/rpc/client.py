"""One server of the fleet, as a trainer sees it: typed calls, each with a deadline, and errors that name the server."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, Self

import grpc.aio

from asyppo_async.concurrency import beside, within_own_time
from asyppo_async.errors import FleetUnavailable
from asyppo_async.rpc import codec
from asyppo_async.rpc.calls import (
    GenerateCall,
    ResponseParts,
    ServedChecksums,
    all_of,
    check_first,
    served_checksums_of,
)
from asyppo_async.rpc.channel import PING_INTERVAL_S, PING_TIMEOUT_S, client_options
from asyppo_async.rpc.codec import SampleTokens
from asyppo_async.rpc.connection import Connection, chunk_of, readable
from asyppo_async.rpc.info import ServerInfo, decode_info
from asyppo_async.rpc.intake import Intake
from asyppo_async.rpc.pulse import SILENCE_S, Guarded, Pulse
from asyppo_async.rpc.requests import generate_request
from asyppo_async.rpc.security import OPEN, ClientSecurity
from asyppo_async.rpc.status import error_of
from asyppo_async.rpc.v1 import fleet_pb2
from asyppo_async.rpc.weight_calls import ANSWER_S, WeightCalls
from asyppo_async.types import Response

_log = logging.getLogger(__name__)

WATCH_S = 5.0
"""A watched server has this time beyond its interval before it counts as gone."""


class FleetClient:
    """`async with FleetClient("host:port") as client`. Leaving ends every call that is under way."""

    def __init__(
        self,
        address: str,
        *,
        security: ClientSecurity = OPEN,
        silence_s: float = SILENCE_S,
        ping_interval_s: float = PING_INTERVAL_S,
        ping_timeout_s: float = PING_TIMEOUT_S,
    ) -> None:
        """`silence_s`: calls that may last give up a server that says nothing for so long, answers or life signs."""
        self.address = address
        self.silence_s = silence_s
        self._connection = Connection(address, security, client_options(ping_interval_s, ping_timeout_s))
        self._pulse = Pulse(address, self.watch, silence_s)
        self.weights = WeightCalls(self._connection, self._pulse)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._connection)
        await self._stack.enter_async_context(beside(self._pulse.run()))
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._stack.__aexit__(*error)

    async def info(self, deadline_s: float) -> ServerInfo:
        """Identity, limits, state and load."""
        message = await self._connection.call(
            "GetInfo", self._connection.rollout.GetInfo, fleet_pb2.GetInfoRequest(), deadline_s
        )
        with self._connection.checking("GetInfo"):
            return decode_info(message)

    async def watch(self, interval_s: float) -> AsyncGenerator[ServerInfo, None]:
        """`info` at once, at every change of the weights' state, and every `interval_s`, until the server ends.

        Raises:
            FleetError: the server does not answer, or ended.
        """
        request = fleet_pb2.WatchInfoRequest(interval_s=interval_s)
        stream = self._connection.rollout.WatchInfo(request, metadata=self._connection.metadata)
        try:
            while True:
                message = await within_own_time(stream.read(), interval_s + WATCH_S)
                if message is grpc.aio.EOF:
                    raise FleetUnavailable(f"server {self.address}: WatchInfo: the server ended the stream")
                with self._connection.checking("WatchInfo"):
                    info = decode_info(readable(message))
                yield info
        except TimeoutError:
            words = f"no word within {interval_s + WATCH_S:g} s; is it stopped or cut off?"
            raise FleetUnavailable(f"server {self.address}: WatchInfo: {words}") from None
        except grpc.aio.AioRpcError as error:
            raise error_of(self.address, "WatchInfo", error, interval_s) from error
        finally:
            stream.cancel()

    async def checksums(self, deadline_s: float) -> ServedChecksums | None:
        """Of the weights that are served; None: no publication has loaded them, or they are unknown."""
        request = fleet_pb2.GetChecksumsRequest()
        message = await self._connection.call(
            "GetChecksums", self._connection.rollout.GetChecksums, request, deadline_s
        )
        return served_checksums_of(message) if message.tensors else None

    async def drain(self, grace_s: float | None, deadline_s: float) -> int:
        """Let the server end as after SIGTERM.

        Args:
            grace_s: For calls that run; None: what the server was started with.
            deadline_s: For the answer, which comes as soon as the drain has begun.

        Returns:
            Samples that were running or queued.
        """
        request = fleet_pb2.DrainRequest(grace_s=-1.0 if grace_s is None else grace_s)
        message = await self._connection.call("Drain", self._connection.admin.Drain, request, deadline_s)
        return int(message.num_samples)

    async def cancel(self, request_id: str, sample_indices: Sequence[int], deadline_s: float) -> int:
        """End samples of a running call, by their index at this server; none: all. Returns how many were ended.

        `RequestRejected`: no call of that id runs there.
        """
        request = fleet_pb2.CancelRequest(request_id=request_id, sample_indices=sample_indices)
        message = await self._connection.call(
            f"Cancel {request_id}", self._connection.rollout.Cancel, request, deadline_s
        )
        return int(message.num_samples)

    @asynccontextmanager
    async def generate(
        self, call: GenerateCall, deadline_s: float
    ) -> AsyncIterator[AsyncIterator[SampleTokens]]:
        """The chunks of a request as they come; leaving the block cancels what is not finished.

        Raises:
            FleetError: while iterating; see `asyppo_async.errors`.
        """
        with self._generating(call, deadline_s) as guarded:
            yield self._chunks(guarded, call, deadline_s)

    def _generating(self, call: GenerateCall, deadline_s: float) -> Guarded:
        """The stream itself; to be read under `_translating`."""
        connection = self._connection
        return self._pulse.guarding(
            connection.generate(generate_request(call), timeout=deadline_s, metadata=connection.metadata)
        )

    @contextmanager
    def _translating(self, what: str, guarded: Guarded, deadline_s: float) -> Iterator[None]:
        """What reading a stream raises becomes an error of ours."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise error_of(self.address, what, error, deadline_s) from error
        except ValueError as error:
            raise self._connection.broken(what, error) from error
        except asyncio.CancelledError:
            if not guarded.is_cut:
                raise
            raise self._pulse.silence(what) from None

    async def _chunks(
        self, guarded: Guarded, call: GenerateCall, deadline_s: float
    ) -> AsyncIterator[SampleTokens]:
        what = f"Generate {call.request_id}"
        with self._translating(what, guarded, deadline_s):
            async for data in guarded.call:
                self._pulse.heard()
                message = chunk_of(data)
                if room := check_first(message, call):
                    self._log_clipped(what, room)
                for sample in message.samples:
                    yield codec.decode_chunk(sample, has_extras=call.has_extras)

    def _log_clipped(self, what: str, room: int) -> None:
        _log.warning("server %s: %s: max_tokens is cut to %d, for lack of room", self.address, what, room)

    async def collect(
        self,
        call: GenerateCall,
        deadline_s: float,
        on_tokens: Callable[[int], None],
        parts: ResponseParts | None = None,
    ) -> tuple[Response, ...]:
        """All samples of a request, whole, by sample index.

        Args:
            call: What is asked for.
            deadline_s: For all of it.
            on_tokens: Called with the tokens of all samples so far, whenever some arrive.
            parts: See `collect_until`.

        Raises:
            FleetUnavailable: the server, the stream or a sample ended before every sample was finished.
            RequestRejected: a prompt with what there is of its response leaves no room for a token.
            FleetError: what came is not what the contract says; names the sample.
        """
        parts = parts or ResponseParts(call.num_samples, call.sampling, call.begun)
        collected = await self.collect_until(call, deadline_s, on_tokens, parts)
        return all_of(collected, parts.failures, f"server {self.address}", call, deadline_s)

    async def collect_until(
        self,
        call: GenerateCall,
        deadline_s: float,
        on_tokens: Callable[[int], None],
        parts: ResponseParts | None = None,
    ) -> tuple[Response | None, ...]:
        """As `collect`, but what fails, or is not finished at the deadline, is None and lets the others be.

        `parts` is what has arrived of this call from other servers: only the rest is asked for. What arrives here is
        found in it if this server fails too.
        """
        what = f"Generate {call.request_id}"
        parts = parts or ResponseParts(call.num_samples, call.sampling, call.begun)
        indices, rest = parts.unfinished(), parts.rest_of(call)
        intake = Intake(rest, parts, indices, on_tokens, partial(self._log_clipped, what))
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                with (
                    self._generating(rest, deadline_s + ANSWER_S) as guarded,
                    self._translating(what, guarded, deadline_s),
                    intake,
                ):
                    # Little is done for each message: it bounds what one core takes in.
                    async for data in guarded.call:
                        self._pulse.heard()
                        intake.put(data)
            if parts.unfinished():
                raise FleetUnavailable(
                    f"server {self.address}: {what}: the stream ended before samples {parts.unfinished()} were finished"
                )
        with self._connection.checking(what):
            return parts.responses()
