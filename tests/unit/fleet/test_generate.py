"""`Generate` over real gRPC: streams, order, bounds, cancellation, refusals."""

import numpy as np
import pytest

from asyppo_async.errors import FleetMismatch, FleetOverloaded, FleetUnavailable, RequestRejected
from asyppo_async.fleet.engine.protocol import WeightsLabel
from asyppo_async.fleet.engine.scripted import Script
from asyppo_async.rpc.calls import GenerateCall, ResponseParts
from asyppo_async.rpc.codec import SampleTokens
from asyppo_async.types import VersionRuns

DEADLINE_S = 20.0


async def test_generate_when_several_samples_then_all_arrive_whole(serving, draw) -> None:
    async with serving() as server:
        responses = await server.client.collect(
            draw(num_samples=3, max_tokens=10), DEADLINE_S, lambda _: None
        )
    expected = (12 + 7 * np.arange(10)) % 64
    for response in responses:
        assert response.token_ids.tolist() == expected.tolist()
        np.testing.assert_allclose(response.behaviour_logprobs, -(1 + np.arange(10) / 1000), rtol=1e-6)
        assert response.versions.per_token().tolist() == [0] * 10
        assert response.finish_reason == "length"


@pytest.mark.report("P32")
async def test_generate_when_a_stop_id_is_sampled_then_it_is_the_last_token(serving, draw) -> None:
    async with serving() as server:
        (response,) = await server.client.collect(draw(stop_token_ids=(33,)), DEADLINE_S, lambda _: None)
    assert response.token_ids.tolist() == [12, 19, 26, 33]
    assert response.finish_reason == "stop"


@pytest.mark.report("P34")
async def test_generate_when_the_first_token_ends_it_then_the_response_has_one_token(serving, draw) -> None:
    async with serving() as server:
        (response,) = await server.client.collect(draw(stop_token_ids=(12,)), DEADLINE_S, lambda _: None)
    assert response.token_ids.tolist() == [12] and response.finish_reason == "stop"


@pytest.mark.report("P31")
async def test_generate_when_a_prompt_begins_with_two_equal_ids_then_the_engine_gets_just_these(
    serving, draw
) -> None:
    """What another stack would take for a doubled BOS is the caller's business: ids are never added or removed."""
    async with serving() as server:
        await server.client.collect(draw(prompt_token_ids=[1, 1, 5]), DEADLINE_S, lambda _: None)
        assert server.engine.prompts == [[1, 1, 5]]


@pytest.mark.report("P34")
async def test_generate_when_an_older_version_is_loaded_meanwhile_then_the_sample_fails_and_says_so(
    serving, draw
) -> None:
    """A trainer that begins anew counts from 0, and whoever else samples from the fleet may stand between."""
    async with serving(Script(delta_delay_s=0.01)) as server:
        server.engine._label = WeightsLabel(version=7, load=0)

        def begin_anew(num_tokens: int) -> None:
            if num_tokens:
                server.engine._label = WeightsLabel(version=2, load=0)

        parts = ResponseParts(1, draw(max_tokens=60).sampling)
        (response,) = await server.client.collect_until(draw(max_tokens=60), DEADLINE_S, begin_anew, parts)
    assert response is None
    assert "version 2 after 7" in parts.failures[0].message


async def test_generate_when_slots_are_few_then_engine_never_has_more(serving, draw) -> None:
    async with serving(Script(delta_delay_s=0.002), max_num_seqs=5, probe_slots=2) as server:
        await server.client.collect(draw(num_samples=9, max_tokens=12), DEADLINE_S, lambda _: None)
        assert server.engine.max_running == 3
        info = await server.client.info(DEADLINE_S)
    assert (info.num_running_samples, info.num_queued_samples) == (0, 0)


async def test_generate_when_queue_is_full_then_overloaded(serving, draw) -> None:
    async with (
        serving(Script(delta_delay_s=0.05), max_num_seqs=2, probe_slots=1, max_queued_samples=2) as server,
        server.client.generate(draw(num_samples=3, max_tokens=400), DEADLINE_S) as stream,
    ):
        await anext(stream)
        info = await server.client.info(DEADLINE_S)
        assert (info.num_running_samples, info.num_queued_samples) == (1, 2)
        with pytest.raises(FleetOverloaded, match="1 samples do not fit"):
            await server.client.collect(draw(), DEADLINE_S, lambda _: None)
        with pytest.raises(RequestRejected, match="at most 3"):
            await server.client.collect(draw(num_samples=4), DEADLINE_S, lambda _: None)


@pytest.mark.report("P75")
async def test_generate_when_client_leaves_then_engine_request_is_aborted(serving, draw, until) -> None:
    async with serving(Script(delta_delay_s=0.01), max_num_seqs=4, probe_slots=1) as server:
        async with server.client.generate(draw(num_samples=5, max_tokens=400), DEADLINE_S) as stream:
            await anext(stream)
            assert len(server.engine.running_ids) == 3
        await until(lambda: not server.engine.running_ids)
        info = await server.client.info(DEADLINE_S)
        assert (info.num_running_samples, info.num_queued_samples) == (0, 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_samples": 0}, "num_samples is 1 to 1024"),
        ({"prompt_token_ids": []}, "at least one token"),
        ({"prompt_token_ids": [64]}, "token id 64 is not in the vocabulary of 64"),
        ({"prompt_token_ids": [-1]}, "-1 is not in the vocabulary"),
        ({"prompt_token_ids": [1] * 512}, "leaves no room"),
        ({"temperature": 0.001}, "temperature is 0 or at least 0.01"),
        ({"max_tokens": 0}, "max_tokens is at least 1"),
        ({"stop_token_ids": (64,)}, "not all in the vocabulary"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
async def test_generate_when_request_is_wrong_then_rejected_with_reason(
    serving, draw, fields: dict[str, object], message: str
) -> None:
    async with serving() as server:
        with pytest.raises(RequestRejected, match=message):
            await server.client.collect(draw(**fields), DEADLINE_S, lambda _: None)
        assert server.engine.seen == []


async def test_generate_when_response_would_pass_the_limit_then_it_is_cut_there(serving, draw) -> None:
    async with serving(Script(max_model_len=512)) as server:
        call: GenerateCall = draw(prompt_token_ids=[1] * 500, max_tokens=100)
        (response,) = await server.client.collect(call, DEADLINE_S, lambda _: None)
    assert len(response.token_ids) == 12
    assert response.finish_reason == "length"


async def test_generate_when_of_another_run_then_mismatch(serving, draw) -> None:
    async with serving() as server:
        with pytest.raises(FleetMismatch, match="holds the weights of no run"):
            await server.client.collect(draw(run_id="run"), DEADLINE_S, lambda _: None)


async def test_generate_when_engine_dies_then_call_ends_and_server_fails(serving, draw) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with serving(Script(delta_delay_s=0.01)) as server:
            async with server.client.generate(draw(max_tokens=400), DEADLINE_S) as stream:
                await anext(stream)
                server.engine.die("out of memory")
                with pytest.raises(FleetUnavailable, match="out of memory"):
                    async for _ in stream:
                        pass
            await server.task
    assert "out of memory" in str(caught.value.exceptions)


async def test_generate_when_samples_have_begun_elsewhere_then_each_goes_on_from_what_there_is(
    serving, draw, sender
) -> None:
    begun = SampleTokens(
        sample_index=1,
        token_ids=np.array([12, 19, 26], dtype=np.int32),
        behaviour_logprobs=np.array([-1.0, -1.1, -1.2], dtype=np.float32),
        versions=VersionRuns(((3, 2), (4, 1))),
        finish_reason=None,
    )
    counts: list[int] = []
    async with serving() as server, sender(server) as weights:
        await weights.publish(5)
        call = draw(run_id="run", num_samples=2, max_tokens=10, begun=(begun,))
        anew, gone_on = await server.client.collect(call, DEADLINE_S, counts.append)
        assert anew.versions.per_token().tolist() == [5] * 10
        assert gone_on.token_ids[:3].tolist() == [12, 19, 26] and len(gone_on.token_ids) == 10
        assert gone_on.versions.per_token().tolist() == [3, 3, 4] + [5] * 7
        np.testing.assert_allclose(gone_on.behaviour_logprobs[:3], [-1.0, -1.1, -1.2], rtol=1e-6)
        assert counts[-1] == 20, "the tokens that were there count"
        assert sorted(server.engine.prompts[-2:]) == [[3, 4, 5], [3, 4, 5, 12, 19, 26]]


async def test_collect_when_the_server_is_lost_then_what_arrived_can_go_on_elsewhere(serving, draw) -> None:
    call = draw(num_samples=2, max_tokens=30)
    parts = ResponseParts(2, call.sampling)
    async with serving(Script(delta_delay_s=0.05), drain_grace_s=0.05) as server:

        def end(num_tokens: int) -> None:
            if num_tokens >= 16:
                server.stop.received.set()

        with pytest.raises(FleetUnavailable):
            await server.client.collect(call, DEADLINE_S, end, parts)
    begun = parts.begun()
    assert parts.unfinished() == [0, 1] and sum(len(sample.token_ids) for sample in begun) >= 16
    async with serving() as other:
        responses = await other.client.collect(call, DEADLINE_S, lambda _: None, parts)
    for sample, response in zip(begun, responses, strict=True):
        assert len(response.token_ids) == 30
        assert response.token_ids[: len(sample.token_ids)].tolist() == sample.token_ids.tolist()


@pytest.mark.parametrize(
    ("index", "token_ids", "words"),
    [
        (2, [12], "no such sample among 2"),
        (0, [], "it has 0 tokens"),
        (0, list(range(2, 12)), "it has 10 tokens and goes up to max_tokens = 10"),
        (0, [12, 64], "not in the vocabulary of 64"),
        (1, [12, 7], "ends with the stop id 7"),
    ],
)
async def test_generate_when_a_begun_sample_is_wrong_then_rejected_with_reason(
    serving, draw, index: int, token_ids: list[int], words: str
) -> None:
    begun = SampleTokens(
        sample_index=index,
        token_ids=np.array(token_ids, dtype=np.int32),
        behaviour_logprobs=np.zeros(len(token_ids), dtype=np.float32),
        versions=VersionRuns.of([0] * len(token_ids)),
        finish_reason=None,
    )
    async with serving() as server:
        call = draw(num_samples=2, max_tokens=10, stop_token_ids=(7,), begun=(begun,))
        async with server.client.generate(call, DEADLINE_S) as stream:
            with pytest.raises(RequestRejected, match=words):
                await anext(stream)
