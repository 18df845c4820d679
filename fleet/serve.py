"""The life of a server: bind, start the engine, serve, drain."""

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from asyppo_async.config.serve import ServeConfig
from asyppo_async.errors import AsyppoError, ConfigError, FleetError
from asyppo_async.fleet.call_error import CallError
from asyppo_async.fleet.decoding import DecodeCheck
from asyppo_async.fleet.engine.protocol import Engine
from asyppo_async.fleet.handlers import AdminServicer, RolloutServicer, WeightSessionServicer
from asyppo_async.fleet.identity import identify
from asyppo_async.fleet.joining import advertised, keep_joining
from asyppo_async.fleet.metrics import metrics_endpoint
from asyppo_async.fleet.port import address_text, check_free
from asyppo_async.fleet.queue import AdmissionQueue
from asyppo_async.fleet.receiver import Receiver
from asyppo_async.fleet.rollouts import ReleaseGate, RolloutFloor
from asyppo_async.fleet.security import Token, TokenCheck, server_credentials, tokens_of
from asyppo_async.fleet.service import FleetService
from asyppo_async.fleet.stop import StopSignal
from asyppo_async.fleet.update_state import UpdateState
from asyppo_async.rpc.channel import server_options
from asyppo_async.rpc.v1 import fleet_pb2, fleet_pb2_grpc
from asyppo_async.weights.manifest import Manifest

logger = logging.getLogger(__name__)

OpenEngine = Callable[[ServeConfig], AbstractAsyncContextManager[Engine]]

_STOP_GRACE_S = 1.0


async def serve(config: ServeConfig, open_engine: OpenEngine, stop: StopSignal) -> None:
    """Serve until `stop`, or until the engine dies.

    Raises:
        ConfigError: a setting is wrong, or the port is taken.
        FleetError: the engine did not start, or died.
    """
    tokens = tokens_of(config, os.environ)
    config.check_exposure(bool(tokens))
    identity = identify(config)
    service = FleetService(identity, config, stop)
    async with contextlib.AsyncExitStack() as stack:
        health_servicer = health.aio.HealthServicer()
        server, port = await stack.enter_async_context(_listening(config, tokens, service, health_servicer))
        if config.join:
            advertised(config, port)  # before anything heavy starts
        logger.info("listening on %s:%d, starting the engine for %s", config.host, port, config.model)
        metrics_port = await stack.enter_async_context(
            metrics_endpoint(config, service.metrics, service.info)
        )
        engine = await _opened_unless_stopped(stack, open_engine(config), stop)
        if engine is None:
            return
        try:
            await _run(config, service, engine, identity.manifest, health_servicer, port, metrics_port, stop)
        finally:
            # Before the engine goes: no handler may find it gone.
            await server.stop(_STOP_GRACE_S)


async def _opened_unless_stopped(
    stack: contextlib.AsyncExitStack, opening: AbstractAsyncContextManager[Engine], stop: StopSignal
) -> Engine | None:
    """The engine, or None if the signal came first; then its start is cancelled."""
    task = asyncio.current_task()
    if task is None:
        raise AssertionError("no task runs")
    engine: Engine | None = None
    failure: AsyppoError | None = None
    is_starting = True

    async def cancel_on_stop() -> None:
        await stop.received.wait()
        if is_starting:
            task.cancel()

    try:
        async with asyncio.TaskGroup() as tasks:
            watcher = tasks.create_task(cancel_on_stop())
            try:
                engine = await stack.enter_async_context(opening)
            except AsyppoError as error:  # not through the task group, which would wrap it
                failure = error
            is_starting = False
            watcher.cancel()
    except asyncio.CancelledError:
        if not stop.received.is_set():
            raise
        task.uncancel()
    if failure is not None:
        raise failure
    return engine


async def _run(
    config: ServeConfig,
    service: FleetService,
    engine: Engine,
    manifest: Manifest,
    health_servicer: health.aio.HealthServicer,
    port: int,
    metrics_port: int | None,
    stop: StopSignal,
) -> None:
    floor = RolloutFloor(
        engine=engine,
        queue=AdmissionQueue(
            num_slots=(config.max_num_seqs - config.probe_slots) * config.data_parallel_size,
            max_queued=config.max_queued_samples,
        ),
        state=UpdateState(),
        gate=ReleaseGate(),
        max_calls=config.max_calls,
        chunk_tokens=config.chunk_tokens,
        chunk_s=config.chunk_s / 2,  # the other half is the engine's
        heard=service.watch.heard,
    )
    failure: str | None = None
    async with asyncio.TaskGroup() as tasks:
        receiver = Receiver(floor=floor, manifest=manifest, num_probe_slots=config.probe_slots, tasks=tasks)
        service.attach(floor, receiver)
        background = [
            tasks.create_task(receiver.watch_lease()),
            tasks.create_task(_report_health(service, receiver, health_servicer)),
            tasks.create_task(service.watch.run(engine)),
        ]
        if config.join:
            background.append(tasks.create_task(keep_joining(config, advertised(config, port), floor.state)))
        dead = tasks.create_task(engine.wait_failed())
        stopped = tasks.create_task(stop.received.wait())
        if config.ready_file is not None:
            listening = {"host": config.host, "port": port, "metrics_port": metrics_port}
            await asyncio.to_thread(_write_ready, config.ready_file, listening)
        logger.info("ready: serving %s on %s:%d", config.model, config.host, port)
        await asyncio.wait({dead, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not dead.done():
            service.lifecycle = "draining"
            await health_servicer.enter_graceful_shutdown()
            await _drain(floor, dead, service.drain_grace_s)
        if dead.done():
            failure = dead.result()
            service.lifecycle = "failed"
            floor.end_all(CallError("UNAVAILABLE", failure))
        await receiver.close()
        for task in (*background, dead, stopped):
            task.cancel()
    if failure is not None:
        raise FleetError(failure)


async def _drain(floor: RolloutFloor, dead: asyncio.Task[str], grace_s: float) -> None:
    """Let running calls finish, then end the others."""
    async with asyncio.TaskGroup() as tasks:
        empty = tasks.create_task(floor.wait_empty())
        await asyncio.wait({empty, dead}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        empty.cancel()
    floor.end_all(CallError("UNAVAILABLE", f"the server shut down after a grace of {grace_s:g} s"))


async def _report_health(
    service: FleetService, receiver: Receiver, health_servicer: health.aio.HealthServicer
) -> None:
    """Keep grpc.health.v1 true. Waits for: changes of the weights' state. Unblocked by: every session call."""
    rollout = fleet_pb2.DESCRIPTOR.services_by_name["Rollout"].full_name
    await health_servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    while True:
        serving = service.state in ("serving", "updating")
        status = health_pb2.HealthCheckResponse.SERVING
        await health_servicer.set(rollout, status if serving else health_pb2.HealthCheckResponse.NOT_SERVING)
        await receiver.wait_changed()


@contextlib.asynccontextmanager
async def _listening(
    config: ServeConfig,
    tokens: Sequence[Token],
    service: FleetService,
    health_servicer: health.aio.HealthServicer,
) -> AsyncIterator[tuple[grpc.aio.Server, int]]:
    """Bind before anything heavy starts, so that a taken port is known at once."""
    credentials = server_credentials(config)
    check_free(config.host, config.port)
    # Outermost first.
    checks = [*([TokenCheck(tokens)] if tokens else []), DecodeCheck()]
    server = grpc.aio.server(
        interceptors=checks, options=server_options(max_receive_bytes=config.max_message_mib * 2**20)
    )
    fleet_pb2_grpc.add_RolloutServicer_to_server(RolloutServicer(service), server)  # type: ignore[no-untyped-call]
    fleet_pb2_grpc.add_AdminServicer_to_server(AdminServicer(service), server)  # type: ignore[no-untyped-call]
    fleet_pb2_grpc.add_WeightSessionServicer_to_server(WeightSessionServicer(service), server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    await health_servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    try:
        address = address_text(config.host, config.port)
        port = (
            server.add_insecure_port(address)
            if credentials is None
            else server.add_secure_port(address, credentials)
        )
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error}") from error
    await server.start()
    try:
        yield server, port
    finally:
        await server.stop(None)


def _write_ready(path: Path, listening: Mapping[str, object]) -> None:
    """Whole or not at all: whoever waits for the file reads it as soon as it is there."""
    line = json.dumps({**listening, "pid": os.getpid()}) + "\n"
    if path.exists() and not path.is_file():  # a pipe (/dev/fd/N) of whoever started this server
        path.write_text(line, encoding="utf-8")
        return
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(line, encoding="utf-8")
    partial.replace(path)
