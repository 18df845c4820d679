"""What `Generate` promises of single samples, of bounds, and of what it may return besides. Scripted engines."""

import asyncio
from dataclasses import replace
from typing import Any

import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from asyppo_async.errors import FleetOverloaded, FleetUnavailable, RequestRejected
from asyppo_async.fleet.engine.protocol import SampleRequest
from asyppo_async.fleet.engine.scripted import Script
from asyppo_async.rpc.calls import ResponseParts
from asyppo_async.rpc.codec import SampleTokens
from asyppo_async.rpc.dispatch import Dispatcher
from asyppo_async.rpc.member import Member
from asyppo_async.rpc.v1 import fleet_pb2, fleet_pb2_grpc
from asyppo_async.types import VersionRuns

DEADLINE_S = 20.0
SLOW = Script(delta_delay_s=0.02)


def begun(sample_index: int, num_tokens: int) -> SampleTokens:
    return SampleTokens(
        sample_index=sample_index,
        token_ids=np.full(num_tokens, 7, np.int32),
        behaviour_logprobs=np.full(num_tokens, -1.0, np.float32),
        versions=VersionRuns(((0, num_tokens),)),
        finish_reason=None,
    )


@pytest.mark.report("P49")
async def test_generate_when_the_prompt_is_too_long_then_every_sample_says_so_and_the_client_refuses(
    serving, draw
) -> None:
    async with serving() as server:
        call = draw(prompt_token_ids=[1] * 512, num_samples=2)
        parts = ResponseParts(2, call.sampling)
        assert await server.client.collect_until(call, DEADLINE_S, lambda _: None, parts) == (None, None)
        assert {failure.kind for failure in parts.failures.values()} == {"too_long"} and len(
            parts.failures
        ) == 2
        with pytest.raises(RequestRejected, match=r"sample \d: a prompt of 512 tokens leaves no room"):
            await server.client.collect(call, DEADLINE_S, lambda _: None)
        assert server.engine.seen == []


@pytest.mark.report("P49")
async def test_generate_when_one_sample_has_no_room_left_then_the_others_are_made(serving, draw) -> None:
    async with serving() as server:
        call = draw(prompt_token_ids=[1] * 500, num_samples=2, max_tokens=40, begun=(begun(1, 12),))
        parts = ResponseParts(2, call.sampling, call.begun)
        first, second = await server.client.collect_until(call, DEADLINE_S, lambda _: None, parts)
        assert first is not None and len(first.token_ids) == 12 and second is None
        assert parts.failures[1].message.startswith("a prompt of 500 tokens with 12 tokens of its response")


@pytest.mark.report("P49")
async def test_generate_when_max_tokens_do_not_fit_then_they_are_clipped_and_that_is_said(
    serving, draw, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as server:
        call = draw(prompt_token_ids=[1] * 500, max_tokens=100)
        (response,) = await server.client.collect(
            replace(call, sampling=replace(call.sampling, min_tokens=50)), DEADLINE_S, lambda _: None
        )
        assert len(response.token_ids) == 12 and response.finish_reason == "length"
        assert "max_tokens is cut to 12" in caplog.text
        caplog.clear()
        await server.client.collect(draw(max_tokens=30), DEADLINE_S, lambda _: None)
        assert "max_tokens is cut" not in caplog.text


async def test_generate_when_the_engine_fails_on_a_sample_then_the_others_are_made(serving, draw) -> None:
    async with serving() as server:
        server.engine.faulty.add(8)
        call = draw(num_samples=3, max_tokens=20)
        parts = ResponseParts(3, call.sampling)
        responses = await server.client.collect_until(call, DEADLINE_S, lambda _: None, parts)
        assert sorted(response is None for response in responses) == [False, False, True]
        (failure,) = parts.failures.values()
        assert failure.kind == "engine_fault" and "no logits at position 8" in failure.message
        # Not tried again elsewhere: a dispatcher hands the failure on.
        server.engine.faulty.add(8)
        member = Member(server.client, await server.client.info(DEADLINE_S))
        collected = await Dispatcher(None).collect_on(member, call, DEADLINE_S)  # type: ignore[arg-type]
        assert len(collected.failures) == 1 and collected.samples.count(None) == 1
        assert member.outstanding_tokens == 0 and not member.prompts


async def test_cancel_when_samples_are_named_then_they_end_and_the_others_go_on(serving, draw) -> None:
    async with serving(SLOW, max_num_seqs=4, probe_slots=1) as server:
        call = draw(num_samples=5, max_tokens=60)
        parts = ResponseParts(5, call.sampling)
        arrived = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            collecting = tasks.create_task(
                server.client.collect_until(call, DEADLINE_S, lambda _: arrived.set(), parts)
            )
            await arrived.wait()
            assert len(server.engine.running_ids) == 3
            assert await server.client.cancel("request", [0, 4, 77], DEADLINE_S) == 2, (
                "a running and a queued one"
            )
            assert await server.client.cancel("request", [0], DEADLINE_S) == 0
        assert [response is None for response in collecting.result()] == [True, False, False, False, True]
        assert {index: failure.kind for index, failure in parts.failures.items()} == {
            0: "cancelled",
            4: "cancelled",
        }
        info = await server.client.info(DEADLINE_S)
        assert (info.num_running_samples, info.num_queued_samples) == (0, 0)
        assert not server.engine.running_ids
        with pytest.raises(RequestRejected, match="no call 'request' runs here"):
            await server.client.cancel("request", [], DEADLINE_S)


async def test_cancel_when_all_are_meant_then_the_call_ends(serving, draw) -> None:
    async with serving(SLOW) as server, asyncio.TaskGroup() as tasks:
        arrived = asyncio.Event()
        call = draw(num_samples=3, max_tokens=400)

        async def collect() -> None:
            with pytest.raises(FleetUnavailable, match="cancelled by the client"):
                await server.client.collect(call, DEADLINE_S, lambda _: arrived.set())

        task = tasks.create_task(collect())
        await arrived.wait()
        assert await server.client.cancel("request", [], DEADLINE_S) == 3
        await asyncio.wait_for(task, 2)


async def test_generate_when_kept_tokens_are_asked_for_then_each_token_has_its_set(serving, draw) -> None:
    async with serving() as server:
        call = draw(max_tokens=10, return_kept_tokens=True)
        call = replace(call, sampling=replace(call.sampling, top_k=3))
        (response,) = await server.client.collect(call, DEADLINE_S, lambda _: None)
        assert response.kept is not None
        assert response.kept.sets() == [
            {token, (token + 1) % 64, (token + 2) % 64} for token in response.token_ids.tolist()
        ]
        plain = await server.client.collect(
            replace(call, return_kept_tokens=False), DEADLINE_S, lambda _: None
        )
        assert plain[0].kept is None
        with pytest.raises(RequestRejected, match="needs top_k between 1 and 64"):
            await server.client.collect(
                replace(call, sampling=replace(call.sampling, top_k=0)), DEADLINE_S, lambda _: None
            )


@pytest.mark.parametrize("num_experts", [200, 300])
async def test_generate_when_experts_are_asked_for_then_they_come_whole(
    serving, draw, num_experts: int
) -> None:
    async with serving(Script(num_experts=num_experts)) as server:
        call = draw(max_tokens=10, return_routed_experts=True)
        (response,) = await server.client.collect(call, DEADLINE_S, lambda _: None)
        request = SampleRequest(
            id="", prompt_token_ids=np.array([3, 4, 5], np.int32), sampling=call.sampling, cache_salt=""
        )
        assert response.routed_experts is not None and response.routed_experts.shape == (12, 3, 2)
        np.testing.assert_array_equal(response.routed_experts, server.engine.experts_of(request, 10))
    async with serving() as dense:
        with pytest.raises(RequestRejected, match="does not say which experts"):
            await dense.client.collect(call, DEADLINE_S, lambda _: None)


@pytest.mark.report("P70")
async def test_generate_when_a_bound_is_passed_then_refused_with_its_option(serving, draw) -> None:
    async with serving(SLOW, max_samples_per_call=4, max_calls=1, max_message_mib=1) as server:
        with pytest.raises(RequestRejected, match=r"1 to 4 \(--max-samples-per-call\), got 5"):
            await server.client.collect(draw(num_samples=5), DEADLINE_S, lambda _: None)
        with pytest.raises(RequestRejected, match="larger than max"):
            await server.client.collect(draw(prompt_token_ids=[1] * 300_000), DEADLINE_S, lambda _: None)
        async with server.client.generate(draw(max_tokens=400), DEADLINE_S) as stream:
            await anext(stream)
            with pytest.raises(FleetOverloaded, match="1 calls are running"):
                await server.client.collect(draw(), DEADLINE_S, lambda _: None)


@pytest.mark.report("P47")
async def test_health_when_the_engine_is_stuck_then_not_serving_though_the_port_answers(
    serving, draw, until
) -> None:
    rollout = fleet_pb2.DESCRIPTOR.services_by_name["Rollout"].full_name

    async with serving(engine_silence_s=0.4) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def status() -> Any:
            return (await stub.Check(health_pb2.HealthCheckRequest(service=rollout), timeout=1)).status

        await asyncio.sleep(0.8)
        assert await status() == health_pb2.HealthCheckResponse.SERVING, "idle, but it answers"
        server.engine.answers.clear()
        infos = server.client.watch(30)
        async with asyncio.timeout(5):
            async for info in infos:
                if info.state == "failed":
                    break
        assert await status() == health_pb2.HealthCheckResponse.NOT_SERVING
        server.engine.answers.set()
        async with asyncio.timeout(5):
            async for info in infos:
                if info.state == "serving":
                    break
        await infos.aclose()
        assert await status() == health_pb2.HealthCheckResponse.SERVING
        assert len(await server.client.collect(draw(), DEADLINE_S, lambda _: None)) == 1


async def test_reflection_when_asked_for_then_there_is_none(serving) -> None:
    async with serving() as server, grpc.aio.insecure_channel(server.address) as channel:
        method = channel.unary_unary("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(b"", timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        unknown = fleet_pb2_grpc.RolloutStub(channel)
        assert (await unknown.GetInfo(fleet_pb2.GetInfoRequest(), timeout=5)).state
