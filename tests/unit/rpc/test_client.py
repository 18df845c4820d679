"""The client against a real gRPC server whose handlers a test writes."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from asyppo_async.errors import (
    FleetError,
    FleetMismatch,
    FleetOverloaded,
    FleetUnavailable,
    RequestRejected,
    WeightSyncError,
)
from asyppo_async.rpc import codec
from asyppo_async.rpc.calls import GenerateCall
from asyppo_async.rpc.channel import server_options
from asyppo_async.rpc.client import FleetClient
from asyppo_async.rpc.codec import SampleTokens
from asyppo_async.rpc.v1 import fleet_pb2, fleet_pb2_grpc
from asyppo_async.types import SamplingParams, VersionRuns

SAMPLING = SamplingParams(
    temperature=1.0, top_p=1.0, top_k=0, min_tokens=0, max_tokens=10, stop_token_ids=(2,)
)


def call(num_samples: int = 2, **changes: Any) -> GenerateCall:
    values: dict[str, Any] = {
        "run_id": "run",
        "incarnation": 1,
        "request_id": "request-7",
        "prompt_id": "prompt-3",
        "prompt_token_ids": [4, 5],
        "num_samples": num_samples,
        "sampling": SAMPLING,
    }
    return GenerateCall(**{**values, **changes})


def chunk(
    sample_index: int, *ids: int, versions: tuple[int, ...] | None = None, finish_reason: Any = None
) -> fleet_pb2.GenerateChunk:
    tokens = SampleTokens(
        sample_index=sample_index,
        token_ids=np.array(ids, np.int32),
        behaviour_logprobs=np.full(len(ids), -0.25, np.float32),
        versions=VersionRuns.of(versions or [0] * len(ids)),
        finish_reason=finish_reason,
    )
    return fleet_pb2.GenerateChunk(samples=[codec.encode_chunk(tokens)])


class Rollout(fleet_pb2_grpc.RolloutServicer):
    def __init__(self, *script: Any) -> None:
        self.script = script
        self.requests: list[fleet_pb2.GenerateRequest] = []
        self.cancelled = asyncio.Event()

    async def Generate(self, request: fleet_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        for item in self.script:
            if isinstance(item, tuple):
                await context.abort(*item)
            elif item == "wait":
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    self.cancelled.set()
                    raise
            else:
                yield item


@asynccontextmanager
async def served(rollout: Any, weights: Any = None) -> AsyncIterator[FleetClient]:
    server = grpc.aio.server(options=server_options())
    fleet_pb2_grpc.add_RolloutServicer_to_server(rollout, server)
    if weights is not None:
        fleet_pb2_grpc.add_WeightSessionServicer_to_server(weights, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with FleetClient(f"127.0.0.1:{port}") as client:
            yield client
    finally:
        await server.stop(None)


def ignore(_: int) -> None:
    pass


async def test_collect_when_samples_are_interleaved_then_each_is_whole_and_tokens_are_counted() -> None:
    rollout = Rollout(
        chunk(1, 5, versions=(3,)),
        chunk(0, 6, 7, versions=(3, 4)),
        chunk(1, 2, versions=(4,), finish_reason="stop"),
        chunk(0, *range(10, 18), versions=(4,) * 8, finish_reason="length"),
    )
    counts: list[int] = []
    async with served(rollout) as client:
        first, second = await client.collect(call(), 5.0, counts.append)
    assert first.token_ids.tolist() == [6, 7, *range(10, 18)]
    assert first.versions.per_token().tolist() == [3] + [4] * 9
    assert first.finish_reason == "length"
    assert second.token_ids.tolist() == [5, 2]
    assert second.behaviour_logprobs.tolist() == [-0.25, -0.25]
    assert counts[-1] == 12 and counts == sorted(counts)
    request = rollout.requests[0]
    assert codec.unpack_ids(request.prompt_token_ids).tolist() == [4, 5]
    assert (request.run_id, request.incarnation, request.num_samples) == ("run", 1, 2)
    assert codec.decode_sampling(request.sampling) == SAMPLING


async def test_collect_when_the_stream_ends_early_then_server_request_and_samples_are_named() -> None:
    async with served(Rollout(chunk(1, 5), chunk(0, 2, finish_reason="stop"))) as client:
        with pytest.raises(
            FleetUnavailable, match=rf"server {client.address}: Generate request-7: .*before samples \[1\]"
        ):
            await client.collect(call(), 5.0, ignore)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([chunk(2, 5)], "sample 2 of a request for 2"),
        ([chunk(0, 2, finish_reason="stop"), chunk(0, 5)], "goes on after it was finished"),
        ([chunk(0, 5, versions=(3,)), chunk(0, 2, versions=(2,), finish_reason="stop")], "never fall"),
        ([chunk(0, 5, finish_reason="stop")], "sample 0 stopped at 5, which is no stop id"),
        ([chunk(0, 5, 2, finish_reason="length")], "sample 0 was cut at 2, which is a stop id"),
        ([fleet_pb2.GenerateChunk(prompt_checksum=1)], "the prompt of 2 tokens arrived as another one"),
        ([chunk(0, *range(3, 14), finish_reason="length")], "11 tokens, max_tokens 10"),
        ([fleet_pb2.GenerateChunk(samples=[fleet_pb2.SampleChunk(token_ids=b"123")])], "4 bytes each"),
    ],
)
@pytest.mark.report("P31")
@pytest.mark.report("P32")
async def test_collect_when_the_contract_is_broken_then_it_says_how(
    script: list[fleet_pb2.GenerateChunk], message: str
) -> None:
    async with served(Rollout(*script, chunk(1, 2, finish_reason="stop"))) as client:
        with pytest.raises(FleetError, match=f"breaks the contract: .*{message}"):
            await client.collect(call(), 5.0, ignore)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, FleetOverloaded),
        (grpc.StatusCode.FAILED_PRECONDITION, FleetMismatch),
        (grpc.StatusCode.INVALID_ARGUMENT, RequestRejected),
        (grpc.StatusCode.UNAVAILABLE, FleetUnavailable),
        (grpc.StatusCode.INTERNAL, FleetUnavailable),
        (grpc.StatusCode.DATA_LOSS, WeightSyncError),
    ],
)
async def test_collect_when_the_server_refuses_then_its_words_are_in_the_error(
    code: grpc.StatusCode, kind: type[Exception]
) -> None:
    async with served(Rollout(chunk(0, 5), (code, "these are its words"))) as client:
        with pytest.raises(
            kind, match=rf"{client.address}: Generate request-7: these are its words \[{code.name}"
        ):
            await client.collect(call(), 5.0, ignore)


async def test_collect_when_the_deadline_passes_then_it_is_named() -> None:
    async with served(Rollout(chunk(0, 5), "wait")) as client:
        started_s = time.monotonic()
        with pytest.raises(FleetUnavailable, match=r"deadline 0\.5 s"):
            await client.collect(call(), 0.5, ignore)
        assert time.monotonic() - started_s < 3


async def test_collect_until_when_the_deadline_passes_then_what_is_finished_is_given() -> None:
    finished = chunk(0, 5, 6, 7, finish_reason="length")
    async with served(Rollout(finished, chunk(1, 5, 6), "wait")) as client:
        tokens: list[int] = []
        first, second = await client.collect_until(call(), 0.5, tokens.append)
        assert first is not None and first.token_ids.tolist() == [5, 6, 7] and second is None
        assert tokens[-1] == 5, "also of the one that is lost"


@pytest.mark.report("P75")
async def test_generate_when_the_block_is_left_then_the_server_stops() -> None:
    rollout = Rollout(chunk(0, 5), "wait")
    async with served(rollout) as client:
        async with client.generate(call(), 30.0) as stream:
            async for tokens in stream:
                assert tokens.token_ids.tolist() == [5]
                break
        await asyncio.wait_for(rollout.cancelled.wait(), 2.0)


async def test_generate_when_its_task_is_cancelled_then_the_server_stops() -> None:
    rollout = Rollout(chunk(0, 5), "wait")
    async with served(rollout) as client:
        arrived = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(client.collect(call(), 30.0, lambda _: arrived.set()))
            await asyncio.wait_for(arrived.wait(), 5.0)
            task.cancel()
        await asyncio.wait_for(rollout.cancelled.wait(), 2.0)


@pytest.mark.report("P70")
@pytest.mark.parametrize(("num_samples", "num_tokens"), [(1, 2 * 2**20), (16, 2**15)])
async def test_collect_when_a_message_is_larger_than_4_mib_then_it_passes(
    num_samples: int, num_tokens: int
) -> None:
    long = list(range(10, 10 + num_tokens))
    sampling = SamplingParams(
        temperature=1.0, top_p=1.0, top_k=0, min_tokens=0, max_tokens=num_tokens, stop_token_ids=(2,)
    )
    message = fleet_pb2.GenerateChunk()
    for index in range(num_samples):
        message.MergeFrom(chunk(index, *long, finish_reason="length"))
    assert message.ByteSize() > 4 * 2**20
    async with served(Rollout(message)) as client:
        responses = await client.collect(call(num_samples, sampling=sampling), 30.0, ignore)
    assert [response.token_ids.tolist() == long for response in responses] == [True] * num_samples


async def test_info_when_nobody_listens_then_the_address_is_in_the_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    async with FleetClient(address) as client:
        with pytest.raises(FleetUnavailable, match=rf"server {address}: GetInfo"):
            await client.info(2.0)


@pytest.mark.report("P76")
async def test_info_when_a_proxy_is_set_then_it_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with served(fleet_pb2_grpc.RolloutServicer()) as client:
        with pytest.raises(RequestRejected, match="not implemented"):
            await client.info(2.0)


async def test_server_options_when_a_second_server_takes_the_port_then_it_fails() -> None:
    server = grpc.aio.server(options=server_options())
    port = server.add_insecure_port("127.0.0.1:0")
    other = grpc.aio.server(options=server_options())
    with pytest.raises(RuntimeError, match="bind"):
        other.add_insecure_port(f"127.0.0.1:{port}")
    await server.stop(None)
    await other.stop(None)


STREAMING_SERVER = """
import asyncio, sys, grpc.aio
from asyppo_async.rpc.channel import server_options
from asyppo_async.rpc.v1 import fleet_pb2, fleet_pb2_grpc

class Rollout(fleet_pb2_grpc.RolloutServicer):
    async def Generate(self, request, context):
        empty = fleet_pb2.SampleChunk()
        yield fleet_pb2.GenerateChunk(samples=[empty])
        await asyncio.sleep(float(sys.argv[2]))
        yield fleet_pb2.GenerateChunk(samples=[empty])

async def main():
    server = grpc.aio.server(options=server_options(float(sys.argv[1]), 1.0))
    fleet_pb2_grpc.add_RolloutServicer_to_server(Rollout(), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""


@asynccontextmanager
async def streaming_server(ping_interval_s: float, silent_s: float) -> AsyncIterator[tuple[int, int]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STREAMING_SERVER, str(ping_interval_s), str(silent_s), stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield process.pid, int(await asyncio.wait_for(process.stdout.readline(), 30))
    finally:
        process.kill()
        await process.wait()


async def test_generate_when_the_server_freezes_then_it_is_noticed_within_interval_and_timeout() -> None:
    async with (
        streaming_server(10.0, 60.0) as (pid, port),
        FleetClient(f"127.0.0.1:{port}", ping_interval_s=1.0, ping_timeout_s=1.0) as client,
        client.generate(call(), 60.0) as stream,
    ):
        await anext(stream)
        os.kill(pid, signal.SIGSTOP)
        started_s = time.monotonic()
        with pytest.raises(FleetUnavailable, match=f"127.0.0.1:{port}"):
            async for _ in stream:
                pass
        assert time.monotonic() - started_s < 6


@pytest.mark.report("P72")
async def test_generate_when_the_stream_is_silent_for_many_pings_then_it_lives() -> None:
    async with (
        streaming_server(0.5, 4.0) as (_, port),
        FleetClient(f"127.0.0.1:{port}", ping_interval_s=0.5, ping_timeout_s=1.0) as client,
        client.generate(call(), 30.0) as stream,
    ):
        assert len([tokens async for tokens in stream]) == 2


def test_client_when_imported_then_torch_is_not() -> None:
    program = (
        "import sys, asyppo_async.rpc.client, asyppo_async.fingerprint; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
