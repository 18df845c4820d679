"""One server of the fleet, as a trainer sees it: typed calls, each with a deadline, and errors that name the server."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Self

import grpc
import grpc.aio

from asyppo_async.errors import (
    AsyppoError,
    FleetError,
    FleetMismatch,
    FleetOverloaded,
    FleetUnavailable,
    RequestRejected,
    WeightSyncError,
)
from asyppo_async.rpc import codec
from asyppo_async.rpc.calls import (
    CommitReport,
    GenerateCall,
    KvOnUpdate,
    ProbeReport,
    ResponseParts,
    SessionPlace,
    StageReport,
    probe_report_of,
)
from asyppo_async.rpc.channel import PING_INTERVAL_S, PING_TIMEOUT_S, client_options
from asyppo_async.rpc.codec import SampleTokens, ServerInfo
from asyppo_async.rpc.v1 import fleet_pb2, fleet_pb2_grpc
from asyppo_async.types import Int32Array, Response, SamplingParams
from asyppo_async.weights.manifest import Manifest

ANSWER_S = 2.0
"""A server that has been told a deadline has this time beyond it to say what it was waiting for."""

# What is not listed (UNAVAILABLE, DEADLINE_EXCEEDED, CANCELLED, INTERNAL, ...) means that this server did not answer.
_ERRORS: dict[grpc.StatusCode, type[AsyppoError]] = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: FleetOverloaded,
    grpc.StatusCode.FAILED_PRECONDITION: FleetMismatch,
    grpc.StatusCode.INVALID_ARGUMENT: RequestRejected,
    grpc.StatusCode.OUT_OF_RANGE: RequestRejected,
    grpc.StatusCode.UNIMPLEMENTED: RequestRejected,
    grpc.StatusCode.PERMISSION_DENIED: RequestRejected,
    grpc.StatusCode.UNAUTHENTICATED: RequestRejected,
    grpc.StatusCode.DATA_LOSS: WeightSyncError,
}


class FleetClient:
    """`async with FleetClient("host:port") as client`. Leaving ends every call that is under way."""

    def __init__(
        self,
        address: str,
        *,
        ping_interval_s: float = PING_INTERVAL_S,
        ping_timeout_s: float = PING_TIMEOUT_S,
    ) -> None:
        self.address = address
        self._options = client_options(ping_interval_s, ping_timeout_s)
        self._channel: Any = None
        self._rollout: Any = None
        self._session: Any = None

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self.address, options=self._options)
        self._rollout = fleet_pb2_grpc.RolloutStub(self._channel)  # type: ignore[no-untyped-call]
        self._session = fleet_pb2_grpc.WeightSessionStub(self._channel)  # type: ignore[no-untyped-call]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close(None)

    async def info(self, deadline_s: float) -> ServerInfo:
        """Identity, limits, state and load."""
        message = await self._call("GetInfo", self._rollout.GetInfo, fleet_pb2.GetInfoRequest(), deadline_s)
        with self._checking("GetInfo"):
            return codec.decode_info(message)

    @asynccontextmanager
    async def generate(
        self, call: GenerateCall, deadline_s: float
    ) -> AsyncIterator[AsyncIterator[SampleTokens]]:
        """The chunks of a request as they come; leaving the block cancels what is not finished.

        Raises:
            FleetError: while iterating; see `asyppo_async.errors`.
        """
        request = fleet_pb2.GenerateRequest(
            run_id=call.run_id,
            incarnation=call.incarnation,
            request_id=call.request_id,
            prompt_id=call.prompt_id,
            prompt_token_ids=codec.pack_ids(call.prompt_token_ids),
            num_samples=call.num_samples,
            sampling=codec.encode_sampling(call.sampling),
        )
        stream = self._rollout.Generate(request, timeout=deadline_s)
        try:
            yield self._chunks(stream, f"Generate {call.request_id}", deadline_s)
        finally:
            # Leaving the loop over a stream does not end the server's side of it.
            stream.cancel()

    async def collect(
        self, call: GenerateCall, deadline_s: float, on_tokens: Callable[[int], None]
    ) -> tuple[Response, ...]:
        """All samples of a request, whole, by sample index.

        Args:
            call: What is asked for.
            deadline_s: For all of it.
            on_tokens: Called with the tokens of all samples so far, whenever some arrive.

        Raises:
            FleetUnavailable: the server, or the stream, ended before every sample was finished.
            FleetError: what came is not what the contract says; names the sample.
        """
        what = f"Generate {call.request_id}"
        parts = ResponseParts(call.num_samples, call.sampling)
        async with self.generate(call, deadline_s) as stream:
            async for chunk in stream:
                with self._checking(what):
                    parts.add(chunk)
                on_tokens(parts.num_tokens)
        if parts.unfinished():
            raise FleetUnavailable(
                f"server {self.address}: {what}: the stream ended before samples {parts.unfinished()} were finished"
            )
        with self._checking(what):
            return parts.responses()

    async def open_session(self, place: SessionPlace, manifest: Manifest, deadline_s: float) -> None:
        """Join the process group and compare the manifests; returns when all ranks have met."""
        request = fleet_pb2.OpenSessionRequest(
            run_id=place.run_id,
            incarnation=place.incarnation,
            epoch=place.epoch,
            rank=place.rank,
            world_size=place.world_size,
            backend=place.backend,
            store_host=place.store_host,
            store_port=place.store_port,
            manifest=codec.encode_manifest(manifest),
            bucket_bytes=place.bucket_bytes,
            lease_s=place.lease_s,
            deadline_s=deadline_s,
        )
        await self._call("OpenSession", self._session.OpenSession, request, deadline_s + ANSWER_S)

    async def stage(self, epoch: int, version: int, deadline_s: float) -> StageReport:
        """Receive one version into host memory; returns when all of it is there."""
        request = fleet_pb2.StageRequest(epoch=epoch, version=version, deadline_s=deadline_s)
        message = await self._call("Stage", self._session.Stage, request, deadline_s + ANSWER_S)
        return StageReport(
            checksums=tuple(message.checksums), num_bytes=message.num_bytes, receive_s=message.receive_s
        )

    async def commit(
        self, epoch: int, version: int, checksums: Sequence[int], kv_on_update: KvOnUpdate, deadline_s: float
    ) -> CommitReport:
        """Pause, load, resume on probation."""
        request = fleet_pb2.CommitRequest(
            epoch=epoch, version=version, checksums=checksums, kv_on_update=kv_on_update
        )
        message = await self._call("Commit", self._session.Commit, request, deadline_s)
        return CommitReport(pause_s=message.pause_s, load_s=message.load_s, resume_s=message.resume_s)

    async def probe(
        self,
        epoch: int,
        version: int,
        fixed: Sequence[Int32Array],
        prompts: Sequence[Int32Array],
        sampling: SamplingParams,
        deadline_s: float,
    ) -> ProbeReport:
        """Score the fixed sequences and continue the prompts with the weights on probation."""
        request = fleet_pb2.ProbeRequest(
            epoch=epoch,
            version=version,
            fixed_token_ids=[codec.pack_ids(sequence) for sequence in fixed],
            prompt_token_ids=[codec.pack_ids(prompt) for prompt in prompts],
            sampling=codec.encode_sampling(sampling),
            deadline_s=deadline_s,
        )
        message = await self._call("Probe", self._session.Probe, request, deadline_s + ANSWER_S)
        with self._checking("Probe"):
            return probe_report_of(message, fixed, len(prompts))

    async def verdict(self, epoch: int, version: int, passed: bool, deadline_s: float) -> None:
        """End the probation."""
        request = fleet_pb2.VerdictRequest(epoch=epoch, version=version, passed=passed)
        await self._call("Verdict", self._session.Verdict, request, deadline_s)

    async def set_version(self, epoch: int, version: int, deadline_s: float) -> None:
        """Give the served weights a new number."""
        request = fleet_pb2.SetVersionRequest(epoch=epoch, version=version)
        await self._call("SetVersion", self._session.SetVersion, request, deadline_s)

    async def close_session(self, epoch: int, deadline_s: float) -> None:
        """Leave the process group; the served weights stay."""
        request = fleet_pb2.CloseSessionRequest(epoch=epoch)
        await self._call("CloseSession", self._session.CloseSession, request, deadline_s)

    async def _call(
        self, what: str, method: Callable[..., Awaitable[Any]], request: object, deadline_s: float
    ) -> Any:
        try:
            return await method(request, timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            raise self._error(what, error, deadline_s) from error

    async def _chunks(self, stream: Any, what: str, deadline_s: float) -> AsyncIterator[SampleTokens]:
        try:
            async for message in stream:
                for sample in message.samples:
                    with self._checking(what):
                        chunk = codec.decode_chunk(sample)
                    yield chunk
        except grpc.aio.AioRpcError as error:
            raise self._error(what, error, deadline_s) from error

    def _error(self, what: str, error: grpc.aio.AioRpcError, deadline_s: float) -> AsyppoError:
        code = error.code()
        words = error.details() or "no message"
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            words = f"{words} (deadline {deadline_s:.1f} s)"
        kind = _ERRORS.get(code, FleetUnavailable)
        return kind(f"server {self.address}: {what}: {words} [{code.name}]")

    @contextmanager
    def _checking(self, what: str) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise FleetError(f"server {self.address}: {what}: breaks the contract: {error}") from error
