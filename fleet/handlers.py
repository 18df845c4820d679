"""The handlers of the services: messages in, work of the parts below, messages out."""

import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from asyppo_async.errors import WeightSyncError
from asyppo_async.fleet.call_error import CallError
from asyppo_async.fleet.call_record import CallRecord
from asyppo_async.fleet.draw import Outgoing
from asyppo_async.fleet.messages import (
    check_positive,
    decode_draw,
    decode_kv,
    decode_probe,
    decode_session,
    outgoing_chunk,
    sample_tokens,
)
from asyppo_async.fleet.service import FleetService
from asyppo_async.fleet.update_state import RunIdentity
from asyppo_async.rpc import codec
from asyppo_async.rpc.info import encode_info
from asyppo_async.rpc.status import RETRY_AFTER
from asyppo_async.rpc.v1 import fleet_pb2, fleet_pb2_grpc
from asyppo_async.weights.group import noticed_by_group

logger = logging.getLogger(__name__)

_RETRY_AFTER_MS = 500
"""What a client that found no room is told to wait, if no other server has any."""


class RolloutServicer(fleet_pb2_grpc.RolloutServicer):
    def __init__(self, service: FleetService) -> None:
        self._service = service

    async def GetInfo(self, request: fleet_pb2.GetInfoRequest, context: Any) -> fleet_pb2.ServerInfo:
        return encode_info(self._service.info())

    async def GetChecksums(
        self, request: fleet_pb2.GetChecksumsRequest, context: Any
    ) -> fleet_pb2.GetChecksumsResponse:
        async with _answering(context, "GetChecksums"):
            loaded = self._service.receiver.loaded
            if loaded is None or self._service.state == "weights_unknown":
                return fleet_pb2.GetChecksumsResponse()
        return fleet_pb2.GetChecksumsResponse(
            run_id=loaded.identity.run_id,
            incarnation=loaded.identity.incarnation,
            version=loaded.version,
            tensors=[
                fleet_pb2.TensorChecksum(name=name, checksum=checksum)
                for name, checksum in zip(loaded.names, loaded.checksums, strict=True)
            ],
        )

    async def WatchInfo(self, request: fleet_pb2.WatchInfoRequest, context: Any) -> None:
        """Waits for: changes of the weights' state, and the interval. Unblocked by: both; ends with its client."""
        async with _answering(context, "WatchInfo"):
            check_positive("interval_s", request.interval_s)
            while True:
                await context.write(encode_info(self._service.info()))
                await self._service.wait_changed(request.interval_s)

    async def Generate(self, request: fleet_pb2.GenerateRequest, context: Any) -> None:
        """A client that goes away cancels this handler, and with it what the engine runs for it."""
        async with _answering(context, f"Generate {request.request_id}"):
            with self._service.recorder.recording(request) as record:
                await self._generate(request, context, record)

    async def _generate(self, request: fleet_pb2.GenerateRequest, context: Any, record: CallRecord) -> None:
        if self._service.lifecycle == "draining":
            raise CallError("UNAVAILABLE", "the server is draining; use another one")
        floor = self._service.floor
        floor.state.check_generate(RunIdentity(run_id=request.run_id, incarnation=request.incarnation))
        draw = decode_draw(request, floor.engine.info, self._service.max_samples_per_call)
        first: dict[str, int] = {
            "clipped_max_tokens": draw.clipped_max_tokens,
            "prompt_checksum": codec.checksum_of(draw.prompt_token_ids),
        }

        async def send(items: list[Outgoing]) -> None:
            chunk = fleet_pb2.GenerateChunk(samples=map(outgoing_chunk, items), **first)
            first.clear()
            await context.write(chunk)
            self._service.traffic.note(record.sent(items), time.monotonic())

        with floor.call(draw) as call:
            record.admitted(draw)
            await call.run(send)

    async def Cancel(self, request: fleet_pb2.CancelRequest, context: Any) -> fleet_pb2.CancelResponse:
        async with _answering(context, f"Cancel {request.request_id}"):
            num_samples = self._service.floor.cancel(request.request_id, request.sample_indices)
        return fleet_pb2.CancelResponse(num_samples=num_samples)


class AdminServicer(fleet_pb2_grpc.AdminServicer):
    def __init__(self, service: FleetService) -> None:
        self._service = service

    async def Drain(self, request: fleet_pb2.DrainRequest, context: Any) -> fleet_pb2.DrainResponse:
        async with _answering(context, "Drain"):
            if not math.isfinite(request.grace_s):
                raise CallError("INVALID_ARGUMENT", f"grace_s is a number of seconds, got {request.grace_s}")
            info = self._service.info()
            if request.grace_s >= 0:
                self._service.drain_grace_s = request.grace_s
            logger.info("drain asked for by %s, grace %g s", context.peer(), self._service.drain_grace_s)
            self._service.stop.received.set()
        return fleet_pb2.DrainResponse(num_samples=info.num_running_samples + info.num_queued_samples)


class WeightSessionServicer(fleet_pb2_grpc.WeightSessionServicer):
    def __init__(self, service: FleetService) -> None:
        self._service = service

    def _observe(self, **phases_s: float) -> None:
        for phase, seconds in phases_s.items():
            self._service.metrics.update_s.labels(phase).observe(seconds)

    async def OpenSession(
        self, request: fleet_pb2.OpenSessionRequest, context: Any
    ) -> fleet_pb2.OpenSessionResponse:
        async with _answering(context, f"OpenSession {request.run_id!r} epoch {request.epoch}"):
            session, meeting = decode_session(request, self._service.floor.engine.info)
            held_version = await self._service.receiver.open_session(session, meeting)
        return fleet_pb2.OpenSessionResponse(held_version=held_version)

    async def Stage(self, request: fleet_pb2.StageRequest, context: Any) -> fleet_pb2.StageResponse:
        async with _answering(context, f"Stage version {request.version}"):
            check_positive("deadline_s", request.deadline_s)
            report = await self._service.receiver.stage(
                request.epoch,
                request.version,
                request.base_version,
                request.deadline_s,
                decode_kv(request.kv_on_update),
            )
        self._observe(receive=report.wire_s)
        return fleet_pb2.StageResponse(
            checksums=report.checksums, num_bytes=report.num_bytes, receive_s=report.wire_s
        )

    async def Commit(self, request: fleet_pb2.CommitRequest, context: Any) -> fleet_pb2.CommitResponse:
        async with _answering(context, f"Commit version {request.version}"):
            times = await self._service.receiver.commit(
                request.epoch,
                request.version,
                tuple(request.checksums),
                decode_kv(request.kv_on_update),
            )
        self._observe(pause=times.pause_s, load=times.load_s, resume=times.resume_s)
        return fleet_pb2.CommitResponse(pause_s=times.pause_s, load_s=times.load_s, resume_s=times.resume_s)

    async def Probe(self, request: fleet_pb2.ProbeRequest, context: Any) -> fleet_pb2.ProbeResponse:
        async with _answering(context, f"Probe version {request.version}"):
            work = decode_probe(request, self._service.floor.engine.info)
            outcome = await self._service.receiver.probe(request.epoch, request.version, work)
        self._observe(probe=outcome.probe_s)
        return fleet_pb2.ProbeResponse(
            fixed_logprobs=[codec.pack_logprobs(logprobs) for logprobs in outcome.fixed_logprobs],
            sampled=[
                codec.encode_chunk(sample_tokens(index, delta)) for index, delta in enumerate(outcome.sampled)
            ],
            probe_s=outcome.probe_s,
        )

    async def Verdict(self, request: fleet_pb2.VerdictRequest, context: Any) -> fleet_pb2.VerdictResponse:
        async with _answering(context, f"Verdict on version {request.version}"):
            self._service.receiver.judge(request.epoch, request.version, request.passed)
            self._service.metrics.updates.labels("passed" if request.passed else "failed").inc()
        return fleet_pb2.VerdictResponse()

    async def SetVersion(
        self, request: fleet_pb2.SetVersionRequest, context: Any
    ) -> fleet_pb2.SetVersionResponse:
        async with _answering(context, f"SetVersion {request.version}"):
            await self._service.receiver.set_version(request.epoch, request.version)
        return fleet_pb2.SetVersionResponse()

    async def CloseSession(
        self, request: fleet_pb2.CloseSessionRequest, context: Any
    ) -> fleet_pb2.CloseSessionResponse:
        async with _answering(context, f"CloseSession epoch {request.epoch}"):
            await self._service.receiver.close_session(request.epoch)
        return fleet_pb2.CloseSessionResponse()


@contextlib.asynccontextmanager
async def _answering(context: Any, what: str) -> AsyncIterator[None]:
    """Turn the errors that a call may have into its gRPC status; any other is a bug of ours, which gRPC logs."""
    try:
        yield
    except CallError as error:
        logger.info("%s: %s: %s", what, error.status, error)
        if error.status == "RESOURCE_EXHAUSTED":
            context.set_trailing_metadata(((RETRY_AFTER, str(_RETRY_AFTER_MS)),))
        await context.abort(grpc.StatusCode[error.status], str(error))
    except WeightSyncError as error:
        logger.warning("%s: %s", what, error)
        status = grpc.StatusCode.ABORTED if noticed_by_group(str(error)) else grpc.StatusCode.INTERNAL
        await context.abort(status, str(error))
    except ValueError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
