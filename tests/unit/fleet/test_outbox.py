"""When a message is cut: by tokens, by time, by an end. Scripted engines."""

import asyncio
from typing import Literal

import numpy as np
import pytest

from asyppo_async.fleet.call_error import CallError
from asyppo_async.fleet.draw import SampleDelta, SampleFailed
from asyppo_async.fleet.engine.protocol import Delta, EndOfSample, LabelRun, WeightsLabel
from asyppo_async.fleet.engine.scripted import Script
from asyppo_async.fleet.outbox import Outbox
from asyppo_async.rpc.codec import SampleFailure

LONG_S = 3600.0
DEADLINE_S = 20.0


def tokens(index: int, *ids: int, version: int = 3, end: EndOfSample | None = None) -> SampleDelta:
    return SampleDelta(
        sample_index=index,
        delta=Delta(
            token_ids=np.array(ids, np.int32),
            logprobs=-np.array(ids, np.float32),
            runs=(LabelRun(label=WeightsLabel(version=version, load=version), num_tokens=len(ids)),),
            end=end,
        ),
    )


async def begun(chunk_tokens: int = 1000, chunk_s: float = LONG_S) -> Outbox:
    """One of which the first message has gone."""
    outbox = Outbox(chunk_tokens=chunk_tokens, chunk_s=chunk_s)
    outbox.put(tokens(0, 1))
    await asyncio.wait_for(outbox.take(), 5)
    return outbox


async def test_outbox_when_tokens_are_few_and_young_then_they_wait_for_enough_others() -> None:
    outbox = await begun(chunk_tokens=5)
    taking = asyncio.ensure_future(outbox.take())
    for index in (0, 1):
        outbox.put(tokens(index, 2, 3))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not taking.done()
    outbox.put(tokens(0, 4, version=4))
    items, error = await asyncio.wait_for(taking, 5)
    assert error is None
    assert [item.sample_index for item in items] == [0, 1]
    first, second = (item.delta for item in items)
    assert first.token_ids.tolist() == [2, 3, 4] and first.logprobs.tolist() == [-2, -3, -4]
    assert [(run.label.version, run.num_tokens) for run in first.runs] == [(3, 2), (4, 1)]
    assert second.token_ids.tolist() == [2, 3]
    outbox.close()


async def test_outbox_when_nothing_follows_then_tokens_go_after_their_time() -> None:
    outbox = await begun(chunk_s=0.02)
    outbox.put(tokens(0, 2))
    items, _ = await asyncio.wait_for(outbox.take(), 5)
    assert items[0].delta.token_ids.tolist() == [2]


@pytest.mark.parametrize("what", ["first", "end", "failure", "error"])
async def test_outbox_when_something_is_urgent_then_it_goes_at_once_with_what_waits(what: str) -> None:
    outbox = Outbox(chunk_tokens=1000, chunk_s=LONG_S) if what == "first" else await begun()
    outbox.put(tokens(0, 2))
    failed = SampleFailed(sample_index=0, failure=SampleFailure(kind="engine_fault", message="m"))
    urgent = {"end": tokens(0, 3, end="stop"), "failure": failed, "error": CallError("UNAVAILABLE", "u")}
    if what in urgent:
        outbox.put(urgent[what])
    items, error = await asyncio.wait_for(outbox.take(), 5)
    assert items[0].delta.token_ids.tolist() == ([2, 3] if what == "end" else [2])
    assert items[0].delta.end == ("stop" if what == "end" else None)
    assert (items[-1] is failed) == (what == "failure") and (error is not None) == (what == "error")
    outbox.close()


async def test_generate_when_chunks_are_cut_by_tokens_then_messages_are_few(serving, draw) -> None:
    settings = {"chunk_tokens": 32, "chunk_s": LONG_S}
    async with (
        serving(Script(delta_delay_s=0.001), **settings) as server,
        server.client.generate(draw(max_tokens=132), DEADLINE_S) as stream,
    ):
        messages = [chunk.token_ids async for chunk in stream]
    assert np.concatenate(messages).tolist() == ((12 + 7 * np.arange(132)) % 64).tolist()
    sizes = list(map(len, messages))
    assert sizes[0] < 32, "the first tokens at once"
    assert 3 <= len(sizes) <= 5 and min(sizes[1:-1]) >= 32, "then 32 at a time, and what came meanwhile"


class StuckAfter(asyncio.Event):
    """An engine that says nothing any more after so many deltas."""

    def __init__(self, num_deltas: int) -> None:
        super().__init__()
        self.num_deltas = num_deltas

    async def wait(self) -> Literal[True]:
        self.num_deltas -= 1
        return True if self.num_deltas >= 0 else await super().wait()


async def test_generate_when_the_engine_stops_in_mid_chunk_then_what_it_made_arrives(serving, draw) -> None:
    """Slow is above all an engine that does not go on."""
    settings = {"chunk_tokens": 1000, "chunk_s": 0.1, "engine_silence_s": LONG_S}
    async with serving(**settings) as server:
        server.engine.answers = StuckAfter(3)
        async with server.client.generate(draw(max_tokens=400), DEADLINE_S) as stream, asyncio.timeout(10):
            num_arrived = 0
            while num_arrived < 12:
                num_arrived += len((await anext(stream)).token_ids)
