"""The life of a server: health, drain, ports, identity."""

import asyncio
import contextlib
import json
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from asyppo_async.config.serve import ServeConfig
from asyppo_async.errors import ConfigError, FleetError, FleetUnavailable, WeightSyncError
from asyppo_async.fleet.engine.scripted import Script, ScriptedEngine
from asyppo_async.fleet.identity import identify
from asyppo_async.fleet.serve import serve
from asyppo_async.fleet.stop import StopSignal
from asyppo_async.rpc.v1 import fleet_pb2, fleet_pb2_grpc

DEADLINE_S = 20.0
SLOW = Script(delta_delay_s=0.02)


async def health_of(address: str, service: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE_S
        )
        return int(reply.status)


async def test_drain_when_a_call_can_finish_then_it_does(serving, draw, until) -> None:
    async with serving(SLOW, drain_grace_s=10) as server:
        async with asyncio.TaskGroup() as tasks:
            collecting = tasks.create_task(
                server.client.collect(draw(num_samples=2, max_tokens=40), DEADLINE_S, lambda _: None)
            )
            await until(lambda: bool(server.engine.running_ids))
            server.stop.received.set()
            await asyncio.sleep(0.02)
            assert (await server.client.info(DEADLINE_S)).state == "draining"
            with pytest.raises(FleetUnavailable, match="draining"):
                await server.client.collect(draw(), DEADLINE_S, lambda _: None)
        assert [len(response.token_ids) for response in collecting.result()] == [40, 40]
        await asyncio.wait_for(server.task, 5)


async def test_drain_when_a_call_is_too_long_then_it_ends_after_the_grace(serving, draw) -> None:
    async with serving(SLOW, drain_grace_s=0.2) as server:
        async with server.client.generate(draw(max_tokens=500), DEADLINE_S) as stream:
            await anext(stream)
            server.stop.received.set()
            with pytest.raises(FleetUnavailable, match=r"shut down after a grace of 0\.2 s"):
                async for _ in stream:
                    pass
        await asyncio.wait_for(server.task, 5)
        assert server.engine.running_ids == []


async def test_health_when_weights_are_lost_then_rollout_is_not_serving(serving, sender) -> None:
    rollout = "asyppo.v1.Rollout"
    async with serving() as server, sender(server) as trainer:
        assert await health_of(server.address, "") == health_pb2.HealthCheckResponse.SERVING
        assert await health_of(server.address, rollout) == health_pb2.HealthCheckResponse.SERVING
        await trainer.publish(1, passed=False)
        assert await health_of(server.address, rollout) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await health_of(server.address, "") == health_pb2.HealthCheckResponse.SERVING
        await trainer.publish(1)
        assert await health_of(server.address, rollout) == health_pb2.HealthCheckResponse.SERVING


async def test_start_when_the_engine_is_slow_then_info_answers_and_a_signal_ends_it(
    model_folder: Path,
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    config = ServeConfig(model=model_folder, port=port)
    stop = StopSignal()
    cancelled = False

    @contextlib.asynccontextmanager
    async def never_opens(_: ServeConfig) -> AsyncIterator[ScriptedEngine]:
        nonlocal cancelled
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled = True
            raise
        yield ScriptedEngine(Script())

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(serve(config, never_opens, stop))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = fleet_pb2_grpc.RolloutStub(channel)
            info = await stub.GetInfo(fleet_pb2.GetInfoRequest(), timeout=5, wait_for_ready=True)
            assert info.state == fleet_pb2.SERVER_STATE_STARTING
            assert (info.vocab_size, info.max_model_len) == (64, 512)
            with pytest.raises(grpc.aio.AioRpcError, match="still starting"):
                await stub.Generate(fleet_pb2.GenerateRequest(num_samples=1), timeout=5).read()
        stop.received.set()
        await asyncio.wait_for(task, 5)
    assert cancelled


async def test_start_when_port_is_taken_then_one_clear_error(model_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServeConfig(model=model_folder, port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already in use"):
            await serve(config, _unused, StopSignal())


async def test_start_when_the_engine_fails_then_its_words_come_out(model_folder: Path) -> None:
    @contextlib.asynccontextmanager
    async def fails(_: ServeConfig) -> AsyncIterator[ScriptedEngine]:
        raise FleetError("vLLM did not start: no memory")
        yield ScriptedEngine(Script())

    with pytest.raises(FleetError, match="no memory"):
        await serve(ServeConfig(model=model_folder, port=0), fails, StopSignal())


async def test_start_when_the_model_folder_is_wrong_then_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no model folder"):
        await serve(ServeConfig(model=tmp_path / "absent", port=0), _unused, StopSignal())
    with pytest.raises((ConfigError, WeightSyncError), match=r"config\.json"):
        await serve(ServeConfig(model=tmp_path, port=0), _unused, StopSignal())


@contextlib.asynccontextmanager
async def _unused(_: ServeConfig) -> AsyncIterator[ScriptedEngine]:
    raise AssertionError("the engine must not be started")
    yield ScriptedEngine(Script())


def test_start_when_the_weights_are_quantized_then_refused_with_the_reason(
    model_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "quantized"
    shutil.copytree(model_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match=r"are quantized \(awq\).*serve the checkpoint that it was made from"
    ):
        identify(ServeConfig(model=folder))
    identify(ServeConfig(model=model_folder))
