"""Malformed, truncated, oversized and hostile messages against a live server: right status, no hang, no crash."""

import asyncio
import random
from collections import Counter

import grpc.aio
import pytest

from asyppo_async.rpc.channel import client_options
from asyppo_async.rpc.v1 import fleet_pb2
from tests.integration.service.hostile import STREAMS, Hostile, hostile

ANSWER_S = 20.0
AT_ONCE = 16
RIGHT = {
    "OK",
    "ABORTED",
    "FAILED_PRECONDITION",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "RESOURCE_EXHAUSTED",
    "UNIMPLEMENTED",
}
"""UNKNOWN and INTERNAL would be a handler that failed, DEADLINE_EXCEEDED one that hangs, UNAVAILABLE a crash."""


async def status_of(channel: grpc.aio.Channel, message: Hostile) -> str:
    name = f"/{fleet_pb2.DESCRIPTOR.package}.{message.method}"
    try:
        if message.method in STREAMS:
            stream = channel.unary_stream(name)(message.data, timeout=ANSWER_S)
            while await stream.read() is not grpc.aio.EOF:
                if message.method == "Rollout/WatchInfo":
                    stream.cancel()
                    return "OK"
        else:
            await channel.unary_unary(name)(message.data, timeout=ANSWER_S)
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


async def attack(server, draw, seed: int, count: int) -> Counter[str]:
    """Send the messages, many at once, and check after each batch that a good call still works."""
    seen: Counter[str] = Counter()
    messages = hostile(seed, count)
    async with grpc.aio.insecure_channel(server.address, options=client_options()) as channel:
        for start in range(0, count, AT_ONCE):
            batch = messages[start : start + AT_ONCE]
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(status_of(channel, message)) for message in batch]
            for message, answer in zip(batch, asked, strict=True):
                assert answer.result() in RIGHT, f"{message} was answered by {answer.result()}"
                seen[answer.result()] += 1
    info = await server.client.info(1.0)
    assert (info.state, info.num_running_samples, info.num_queued_samples) == ("serving", 0, 0)
    assert len(await server.client.collect(draw(num_samples=2), ANSWER_S, lambda _: None)) == 2
    return seen


async def test_server_when_messages_are_hostile_then_each_gets_its_status_and_it_serves_on(
    serving, draw
) -> None:
    async with serving(max_message_mib=1) as server:
        seen = await attack(server, draw, seed=0, count=400)
    assert {"OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"} <= seen.keys()


async def test_server_when_a_connection_brings_no_http_then_it_serves_on(serving, draw) -> None:
    async with serving() as server:
        chance = random.Random(0)
        host, port = server.address.rsplit(":", 1)
        for _ in range(20):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(chance.choice([b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]) + chance.randbytes(4096))
            try:
                await writer.drain()
                await asyncio.wait_for(reader.read(65536), 5)
            except ConnectionError:
                pass
            writer.close()
        assert len(await server.client.collect(draw(), ANSWER_S, lambda _: None)) == 1


@pytest.mark.long
@pytest.mark.timeout(1200)
async def test_server_when_ten_thousand_messages_are_hostile_then_it_serves_on(serving, draw) -> None:
    async with serving(max_message_mib=1) as server:
        seen = await attack(server, draw, seed=1, count=10_000)
    assert sum(seen.values()) == 10_000
