"""How fast one core takes in trajectories: the real client, decoder, validator and queue, beside a bare gRPC stream.

    python benchmarks/ingest.py [--seconds 2] [--repeats 9]

A server on the first core streams prepared messages as fast as it can, one trajectory each; the client has the second
core. Bare: the same messages over a channel with the same options, read as bytes and thrown away at once; the real
client keeps them until their call has ended. Both take turns. The last line is one JSON object:

    ratio_64, ratio_1024, ratio_8192                    rate of the real path over that of the bare stream before it
    trajectories_per_s_64, ...                          of the real path
    tokens_per_s_64, ...                                of the real path
    loop_lag_p99_ms                                     of the client's loop, over the runs of the real path
    server_loop_lag_p99_ms                              of the server's, over all runs
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import grpc.aio
import numpy as np
import uvloop

from asyppo_async.rpc import codec
from asyppo_async.rpc.calls import GenerateCall
from asyppo_async.rpc.channel import client_options, server_options
from asyppo_async.rpc.client import FleetClient
from asyppo_async.rpc.codec import SampleTokens
from asyppo_async.rpc.requests import generate_request
from asyppo_async.rpc.v1 import fleet_pb2, fleet_pb2_grpc
from asyppo_async.types import Response, SamplingParams, VersionRuns

LENGTHS = (64, 1024, 8192)
GROUP_SIZE = 16
CALLS_AT_ONCE = 8
LAG_EVERY_S = 0.01
START_S = 60
METHOD = "/asyppo.v1.Rollout/Generate"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=2, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=9, help="measurements of each kind and length")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.error("two cores are needed, one for each side")
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(there, cores[0]), daemon=True)
    server.start()
    os.sched_setaffinity(0, {cores[1]})
    try:
        if not here.poll(START_S):
            raise SystemExit(f"error: the server did not start within {START_S} s")
        address = f"127.0.0.1:{here.recv()}"
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            figures = runner.run(measure(address, arguments.seconds, arguments.repeats))
        here.send("stop")
        if here.poll(START_S):
            figures["server_loop_lag_p99_ms"] = here.recv()
    finally:
        server.kill()
        server.join()
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


class PreparedRollout(fleet_pb2_grpc.RolloutServicer):
    """Answers with messages that were packed before; a call's `max_tokens` chooses their length."""

    def __init__(self) -> None:
        self._messages = {
            length: [message_of(index, length) for index in range(GROUP_SIZE)] for length in LENGTHS
        }

    async def Generate(self, data: bytes, context: Any) -> None:
        request = fleet_pb2.GenerateRequest.FromString(data)
        for message in self._messages[request.sampling.max_tokens]:
            await context.write(message)


async def never(_: bytes, __: object) -> None:
    """No life signs: the trajectories are signs enough."""
    await asyncio.Event().wait()


def message_of(index: int, length: int) -> bytes:
    rng = np.random.default_rng(index)
    tokens = SampleTokens(
        sample_index=index,
        token_ids=rng.integers(0, 32_000, length, dtype=np.int32),
        behaviour_logprobs=-rng.random(length, dtype=np.float32),
        versions=VersionRuns(((3, length // 2), (4, length - length // 2))),
        finish_reason="length",
    )
    return bytes(fleet_pb2.GenerateChunk(samples=[codec.encode_chunk(tokens)]).SerializeToString())


def serve(pipe: Connection, core: int) -> None:
    os.sched_setaffinity(0, {core})

    async def run() -> None:
        rollout = PreparedRollout()
        server = grpc.aio.server(options=server_options())
        handler = grpc.unary_stream_rpc_method_handler(rollout.Generate)
        service, method = METHOD.lstrip("/").split("/")
        silent = grpc.unary_stream_rpc_method_handler(never)
        handlers = {method: handler, "WatchInfo": silent}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with loop_lags() as lags:
            pipe.send(port)
            await asyncio.to_thread(pipe.recv)
        pipe.send(p99_ms(lags))
        await server.stop(None)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


async def measure(address: str, seconds: float, repeats: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    all_lags: list[float] = []
    for length in LENGTHS:
        rates: dict[str, list[float]] = {"bare": [], "real": []}
        for _ in range(repeats):
            rates["bare"].append(await bare(address, length, seconds))
            async with loop_lags() as lags:
                rates["real"].append(await real(address, length, seconds))
            all_lags += lags
        medians = {kind: statistics.median(values) for kind, values in rates.items()}
        for kind, median in medians.items():
            print(
                f"{length:5} tokens, {kind}: {median:8.0f} trajectories/s, {median * length / 1e6:6.1f} M tokens/s"
            )
        pairs = zip(rates["real"], rates["bare"], strict=True)
        figures[f"ratio_{length}"] = statistics.median(ours / floor for ours, floor in pairs)
        figures[f"trajectories_per_s_{length}"] = medians["real"]
        figures[f"tokens_per_s_{length}"] = medians["real"] * length
    figures["loop_lag_p99_ms"] = p99_ms(all_lags)
    return figures


def call_of(length: int) -> GenerateCall:
    sampling = SamplingParams(
        temperature=1.0, top_p=1.0, top_k=0, min_tokens=0, max_tokens=length, stop_token_ids=()
    )
    return GenerateCall(
        run_id="bench",
        incarnation=0,
        request_id="ingest",
        prompt_id="p",
        prompt_token_ids=np.arange(128, dtype=np.int32),
        num_samples=GROUP_SIZE,
        sampling=sampling,
    )


async def bare(address: str, length: int, seconds: float) -> float:
    """Messages per second of a stream that is read and thrown away."""
    request = generate_request(call_of(length)).SerializeToString()
    count = 0

    async def read_all(channel: Any, ends_at_s: float) -> None:
        nonlocal count
        while time.monotonic() < ends_at_s:
            async for _ in channel.unary_stream(METHOD)(request):
                count += 1

    async with grpc.aio.insecure_channel(address, options=client_options()) as channel:
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(CALLS_AT_ONCE):
                tasks.create_task(read_all(channel, began_s + seconds))
        return count / (time.monotonic() - began_s)


async def real(address: str, length: int, seconds: float) -> float:
    """Trajectories per second that come out of a bounded queue, each decoded, checked and whole."""
    groups: asyncio.Queue[tuple[Response, ...]] = asyncio.Queue(maxsize=CALLS_AT_ONCE)
    call = call_of(length)
    count = 0

    async def collect_all(client: FleetClient, ends_at_s: float) -> None:
        while time.monotonic() < ends_at_s:
            await groups.put(await client.collect(call, 60, lambda _: None))

    async def take() -> None:
        nonlocal count
        while True:
            responses = await groups.get()
            assert all(len(response.token_ids) == length for response in responses)
            count += len(responses)

    async with FleetClient(address) as client:
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            taker = tasks.create_task(take())
            callers = [
                tasks.create_task(collect_all(client, began_s + seconds)) for _ in range(CALLS_AT_ONCE)
            ]
            await asyncio.wait(callers)
            taker.cancel()
        return count / (time.monotonic() - began_s)


@asynccontextmanager
async def loop_lags() -> AsyncIterator[list[float]]:
    """How late a timer of ten milliseconds was, each time, while the block runs."""
    lags: list[float] = []

    async def watch() -> None:
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(LAG_EVERY_S)
            lags.append(time.monotonic() - began_s - LAG_EVERY_S)

    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch())
        yield lags
        watching.cancel()


def p99_ms(lags: list[float]) -> float:
    return float(np.quantile(lags, 0.99)) * 1000 if lags else 0.0


if __name__ == "__main__":
    main()
