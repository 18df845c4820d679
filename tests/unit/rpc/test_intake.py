"""Messages on their way into a call's parts: several at a time, none of them late, none of them lost."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from asyppo_async.errors import FleetUnavailable
from asyppo_async.rpc import codec
from asyppo_async.rpc.calls import GenerateCall, ResponseParts
from asyppo_async.rpc.codec import SampleTokens
from asyppo_async.rpc.intake import CLOSE_S, MOST, Intake
from asyppo_async.rpc.v1 import fleet_pb2
from asyppo_async.types import SamplingParams, VersionRuns

SAMPLING = SamplingParams(
    temperature=1.0, top_p=1.0, top_k=0, min_tokens=0, max_tokens=1000, stop_token_ids=()
)
CALL = GenerateCall(
    run_id="run",
    incarnation=1,
    request_id="request",
    prompt_id="prompt",
    prompt_token_ids=[4, 5],
    num_samples=2,
    sampling=SAMPLING,
)


def message(sample_index: int, *ids: int, **fields: int) -> bytes:
    tokens = SampleTokens(
        sample_index=sample_index,
        token_ids=np.array(ids, np.int32),
        behaviour_logprobs=np.full(len(ids), -0.25, np.float32),
        versions=VersionRuns(((0, len(ids)),)),
        finish_reason=None,
    )
    return fleet_pb2.GenerateChunk(samples=[codec.encode_chunk(tokens)], **fields).SerializeToString()


def opened(
    parts: ResponseParts,
    on_tokens: Callable[[int], None] = lambda _: None,
    on_clipped: Callable[[int], None] = lambda _: None,
    close_s: float = CLOSE_S,
) -> Intake:
    return Intake(CALL, parts, [0, 3], on_tokens, on_clipped, close_s)


async def test_messages_when_they_come_close_together_then_are_decoded_at_once_and_in_order() -> None:
    parts, counts, clipped = ResponseParts(4, SAMPLING), list[int](), list[int]()
    with opened(parts, counts.append, clipped.append, 60.0) as into:
        into.put(message(1, 7, clipped_max_tokens=9))
        for token in range(1, MOST):
            assert counts == []
            into.put(message(1, 7 + token))
        assert counts == [MOST] and clipped == [9]
        into.put(message(0, 1))
    assert counts == [MOST, MOST + 1], "and the rest at the end"
    first, second = parts.begun()
    assert (first.sample_index, second.sample_index) == (0, 3), "as they are numbered here"
    assert second.token_ids.tolist() == list(range(7, 7 + MOST))


async def test_message_when_it_comes_alone_then_nothing_has_to_follow_it() -> None:
    counted = asyncio.Event()
    with opened(ResponseParts(4, SAMPLING), lambda _: counted.set()) as into:
        for token in (1, 2):
            counted.clear()
            into.put(message(0, token))
            await asyncio.wait_for(counted.wait(), 10)


async def test_messages_when_the_call_breaks_off_then_what_came_is_there() -> None:
    parts = ResponseParts(4, SAMPLING)
    with pytest.raises(FleetUnavailable, match="gone"), opened(parts) as into:
        into.put(message(0, 1, 2))
        into.put(b"\xff" * 9)
        raise FleetUnavailable("gone")
    assert parts.num_tokens == 2


@pytest.mark.parametrize("when", ["next", "end"])
async def test_message_when_it_is_wrong_and_found_late_then_the_call_hears_of_it(when: str) -> None:
    with pytest.raises(ValueError, match="no message"), opened(ResponseParts(4, SAMPLING)) as into:
        into.put(b"\xff" * 9)
        await asyncio.sleep(3 * CLOSE_S)
        if when == "next":
            into.put(message(0, 1))
            pytest.fail("it goes on")
