"""The handlers of both services: messages in, work of the parts below, messages out."""

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any, Literal, cast, get_args

import grpc

from asyppo_async.config.serve import ServeConfig
from asyppo_async.errors import WeightSyncError
from asyppo_async.fleet.call_error import CallError
from asyppo_async.fleet.engine.protocol import KvOnUpdate
from asyppo_async.fleet.identity import ServerIdentity
from asyppo_async.fleet.messages import (
    check_positive,
    decode_draw,
    decode_probe,
    decode_session,
    sample_tokens,
)
from asyppo_async.fleet.receiver import Receiver
from asyppo_async.fleet.rollouts import RolloutFloor, SampleDelta
from asyppo_async.fleet.update_state import NO_RUN, RunIdentity
from asyppo_async.rpc import codec
from asyppo_async.rpc.codec import ServerInfo, ServerState
from asyppo_async.rpc.v1 import fleet_pb2, fleet_pb2_grpc

logger = logging.getLogger(__name__)

Lifecycle = Literal["starting", "running", "draining", "failed"]


class FleetService:
    """What both servicers share. The engine's parts appear with `attach`, when the engine is ready."""

    def __init__(self, identity: ServerIdentity, config: ServeConfig) -> None:
        self._identity = identity
        self._config = config
        self.lifecycle: Lifecycle = "starting"
        self._floor: RolloutFloor | None = None
        self._receiver: Receiver | None = None

    def attach(self, floor: RolloutFloor, receiver: Receiver) -> None:
        self._floor = floor
        self._receiver = receiver
        self.lifecycle = "running"

    @property
    def floor(self) -> RolloutFloor:
        if self._floor is None:
            raise CallError("UNAVAILABLE", "the engine is still starting")
        return self._floor

    @property
    def receiver(self) -> Receiver:
        if self._receiver is None:
            raise CallError("UNAVAILABLE", "the engine is still starting")
        return self._receiver

    @property
    def state(self) -> ServerState:
        if self.lifecycle != "running" or self._floor is None:
            return "starting" if self.lifecycle == "running" else self.lifecycle
        update = self._floor.state
        if update.is_updating:
            return "updating"
        return "serving" if update.served is not None else "weights_unknown"

    def info(self) -> ServerInfo:
        floor, config, model = self._floor, self._config, self._identity.model
        served = floor.state.served if floor is not None else None
        run = served.identity if served is not None else NO_RUN
        longest = config.max_model_len or model.max_positions
        return ServerInfo(
            server_id=self._identity.server_id,
            model_name=str(config.model),
            model_fingerprint=model.model_fingerprint,
            tokenizer_fingerprint=model.tokenizer_fingerprint,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            max_model_len=floor.engine.info.max_model_len if floor is not None else longest,
            max_num_seqs=config.max_num_seqs,
            num_workers=config.tensor_parallel_size,
            dtype=config.dtype,
            state=self.state,
            run_id=run.run_id,
            incarnation=run.incarnation,
            served_version=served.version if served is not None else -1,
            num_running_samples=floor.queue.num_running if floor is not None else 0,
            num_queued_samples=floor.queue.num_queued if floor is not None else 0,
        )


class RolloutServicer(fleet_pb2_grpc.RolloutServicer):
    def __init__(self, service: FleetService) -> None:
        self._service = service

    async def GetInfo(self, request: fleet_pb2.GetInfoRequest, context: Any) -> fleet_pb2.ServerInfo:
        return codec.encode_info(self._service.info())

    async def Generate(self, request: fleet_pb2.GenerateRequest, context: Any) -> None:
        """A client that goes away cancels this handler, and with it what the engine runs for it."""
        async with _answering(context, f"Generate {request.request_id}"):
            if self._service.lifecycle == "draining":
                raise CallError("UNAVAILABLE", "the server is draining; use another one")
            floor = self._service.floor
            floor.state.check_generate(RunIdentity(run_id=request.run_id, incarnation=request.incarnation))
            draw = decode_draw(request, floor.engine.info)

            async def send(deltas: list[SampleDelta]) -> None:
                chunks = [codec.encode_chunk(sample_tokens(each.sample_index, each.delta)) for each in deltas]
                await context.write(fleet_pb2.GenerateChunk(samples=chunks))

            with floor.call(draw) as call:
                await call.run(send)


class WeightSessionServicer(fleet_pb2_grpc.WeightSessionServicer):
    def __init__(self, service: FleetService) -> None:
        self._service = service

    async def OpenSession(
        self, request: fleet_pb2.OpenSessionRequest, context: Any
    ) -> fleet_pb2.OpenSessionResponse:
        async with _answering(context, f"OpenSession {request.run_id!r} epoch {request.epoch}"):
            session, meeting = decode_session(request)
            await self._service.receiver.open_session(session, meeting)
        return fleet_pb2.OpenSessionResponse()

    async def Stage(self, request: fleet_pb2.StageRequest, context: Any) -> fleet_pb2.StageResponse:
        async with _answering(context, f"Stage version {request.version}"):
            check_positive("deadline_s", request.deadline_s)
            report = await self._service.receiver.stage(request.epoch, request.version, request.deadline_s)
        return fleet_pb2.StageResponse(
            checksums=report.checksums, num_bytes=report.num_bytes, receive_s=report.wire_s
        )

    async def Commit(self, request: fleet_pb2.CommitRequest, context: Any) -> fleet_pb2.CommitResponse:
        async with _answering(context, f"Commit version {request.version}"):
            if request.kv_on_update not in get_args(KvOnUpdate):
                raise CallError(
                    "INVALID_ARGUMENT", f"kv_on_update is keep or recompute, got {request.kv_on_update!r}"
                )
            times = await self._service.receiver.commit(
                request.epoch,
                request.version,
                tuple(request.checksums),
                cast(KvOnUpdate, request.kv_on_update),
            )
        return fleet_pb2.CommitResponse(pause_s=times.pause_s, load_s=times.load_s, resume_s=times.resume_s)

    async def Probe(self, request: fleet_pb2.ProbeRequest, context: Any) -> fleet_pb2.ProbeResponse:
        async with _answering(context, f"Probe version {request.version}"):
            work = decode_probe(request, self._service.floor.engine.info)
            outcome = await self._service.receiver.probe(request.epoch, request.version, work)
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
            self._service.receiver.close_session(request.epoch)
        return fleet_pb2.CloseSessionResponse()


@contextlib.asynccontextmanager
async def _answering(context: Any, what: str) -> AsyncIterator[None]:
    """Turn the errors that a call may have into its gRPC status; any other is a bug of ours, which gRPC logs."""
    try:
        yield
    except CallError as error:
        logger.info("%s: %s: %s", what, error.status, error)
        await context.abort(grpc.StatusCode[error.status], str(error))
    except WeightSyncError as error:
        logger.warning("%s: %s", what, error)
        await context.abort(grpc.StatusCode.ABORTED, str(error))
    except ValueError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
