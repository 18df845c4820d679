"""A frozen server is noticed in seconds, and a busy one is not taken for it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from asyppo_async.errors import FleetUnavailable
from asyppo_async.rpc.calls import GenerateCall, SessionPlace
from asyppo_async.rpc.channel import server_options
from asyppo_async.rpc.client import FleetClient
from asyppo_async.rpc.v1 import fleet_pb2, fleet_pb2_grpc
from asyppo_async.types import SamplingParams
from asyppo_async.weights.manifest import manifest_of_checkpoint
from asyppo_async.weights.store import open_store
from tests.integration.service.processes import scripted_server

SILENCE_S = 0.4
CALL = GenerateCall(
    run_id="run",
    incarnation=1,
    request_id="request-7",
    prompt_id="prompt-3",
    prompt_token_ids=[4, 5],
    num_samples=1,
    sampling=SamplingParams(
        temperature=1.0, top_p=1.0, top_k=0, min_tokens=0, max_tokens=10, stop_token_ids=()
    ),
)
EMPTY = fleet_pb2.GenerateChunk(samples=[fleet_pb2.SampleChunk()])

PROGRAM = """
import asyncio, grpc.aio
from tests.integration.service.test_pulse import Rollout
from asyppo_async.rpc.channel import server_options
from asyppo_async.rpc.v1 import fleet_pb2_grpc

async def main():
    server = grpc.aio.server(options=server_options())
    fleet_pb2_grpc.add_RolloutServicer_to_server(Rollout(pauses=[0.0, 60.0]), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""


class Rollout(fleet_pb2_grpc.RolloutServicer):
    def __init__(self, pauses: list[float], *, is_mute: bool = False) -> None:
        self.pauses = pauses
        self.is_mute = is_mute

    async def Generate(self, request: object, context: Any) -> AsyncIterator[Any]:
        for pause_s in self.pauses:
            await asyncio.sleep(pause_s)
            yield EMPTY

    async def WatchInfo(self, request: Any, context: Any) -> AsyncIterator[Any]:
        while True:
            if not self.is_mute:
                info = fleet_pb2.ServerInfo(dtype="float32", state=fleet_pb2.SERVER_STATE_SERVING)
                yield info
            await asyncio.sleep(request.interval_s)


@asynccontextmanager
async def served(rollout: Rollout) -> AsyncIterator[FleetClient]:
    server = grpc.aio.server(options=server_options())
    fleet_pb2_grpc.add_RolloutServicer_to_server(rollout, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with FleetClient(f"127.0.0.1:{port}", silence_s=SILENCE_S) as client:
            yield client
    finally:
        await server.stop(None)


@pytest.mark.report("P71")
async def test_generate_when_the_server_freezes_then_it_is_given_up_in_seconds() -> None:
    """The transport's own timeout is a minute and more."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, stdout=subprocess.PIPE, cwd=os.getcwd()
    )
    try:
        assert process.stdout is not None
        address = f"127.0.0.1:{int(await asyncio.wait_for(process.stdout.readline(), 30))}"
        async with (
            FleetClient(address, silence_s=SILENCE_S) as client,
            client.generate(CALL, 60.0) as stream,
        ):
            await anext(stream)
            await asyncio.sleep(3 * SILENCE_S)  # silent, but alive: its life signs come
            process.send_signal(signal.SIGSTOP)
            started_s = time.monotonic()
            with pytest.raises(FleetUnavailable, match=rf"{address}: Generate request-7: no sign of life"):
                await anext(stream)
            assert time.monotonic() - started_s < SILENCE_S + 2
    finally:
        process.kill()
        await process.wait()


async def test_generate_when_tokens_come_without_life_signs_then_the_stream_lives() -> None:
    async with (
        served(Rollout([SILENCE_S / 3] * 9, is_mute=True)) as client,
        client.generate(CALL, 30.0) as stream,
    ):
        assert len([chunk async for chunk in stream]) == 9


async def test_generate_when_neither_comes_then_given_up_and_the_next_call_starts_anew() -> None:
    rollout = Rollout([60.0], is_mute=True)
    async with served(rollout) as client:
        with pytest.raises(FleetUnavailable, match="is it stopped or cut off"):
            async with client.generate(CALL, 30.0) as stream:
                await anext(stream)
        rollout.is_mute, rollout.pauses = False, [1.5 * SILENCE_S]
        async with client.generate(CALL, 30.0) as stream:
            assert len([chunk async for chunk in stream]) == 1


async def test_generate_when_the_client_was_held_up_then_the_server_is_not_blamed() -> None:
    async with served(Rollout([0.0, 4 * SILENCE_S])) as client, client.generate(CALL, 30.0) as stream:
        await anext(stream)
        time.sleep(3 * SILENCE_S)  # noqa: ASYNC251  what is tested
        assert len([chunk async for chunk in stream]) == 1


async def test_generate_when_its_task_is_cancelled_then_that_comes_out_as_itself() -> None:
    async with served(Rollout([60.0])) as client, asyncio.TaskGroup() as tasks:

        async def read() -> None:
            async with client.generate(CALL, 60.0) as stream:
                await anext(stream)

        task = tasks.create_task(read())
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


@pytest.mark.report("P71")
async def test_weight_calls_when_the_server_freezes_then_each_is_given_up_in_seconds(
    model_folder: Path, tmp_path: Path
) -> None:
    """Their deadlines are those of the work. What a server has begun ends so too, and what it never read."""
    manifest = manifest_of_checkpoint(model_folder, "float32")
    store, port = await asyncio.to_thread(open_store, "127.0.0.1", 2, 60.0)
    place = SessionPlace(
        run_id="run",
        incarnation=0,
        epoch=1,
        rank=1,
        world_size=2,
        backend="gloo",
        store_host="127.0.0.1",
        store_port=port,
        bucket_bytes=4096,
        lease_s=60.0,
    )
    async with (
        scripted_server(model_folder, tmp_path / "ready.json") as (process, address),
        FleetClient(address, silence_s=SILENCE_S) as client,
        asyncio.TaskGroup() as tasks,
    ):
        weights = client.weights
        opening = tasks.create_task(given_up(weights.open_session(place, manifest, 60.0)))
        await asyncio.sleep(3 * SILENCE_S)
        assert not opening.done(), "it waits for the other rank, and its life signs come"
        process.send_signal(signal.SIGSTOP)
        stopped_s = time.monotonic()
        calls = {
            "Stage": weights.stage(1, 1, 60.0),
            "Commit": weights.commit(1, 1, (), "keep", 60.0),
            "Probe": weights.probe(1, 1, [], [], CALL.sampling, 60.0),
            "Verdict": weights.verdict(1, 1, True, 60.0),
        }
        asked = {name: tasks.create_task(given_up(call)) for name, call in calls.items()}
        for name, task in {"OpenSession": opening, **asked}.items():
            error = await task
            assert str(error).startswith(f"server {address}: {name}: no sign of life for {SILENCE_S:g} s")
            assert error.server == address, "a publication goes on without it"
        assert time.monotonic() - stopped_s < 20
        process.send_signal(signal.SIGCONT)
        assert (await client.info(20.0)).state == "serving"
    del store


async def given_up(call: Coroutine[Any, Any, Any]) -> FleetUnavailable:
    with pytest.raises(FleetUnavailable) as caught:
        await call
    return caught.value
