"""A probe beside requests that leave it no KV: an engine that answers it only once it was told to make room."""

import asyncio

import numpy as np
import pytest

from asyppo_async.fleet.call_error import CallError
from asyppo_async.fleet.engine.scripted import Script, ScriptedEngine
from asyppo_async.fleet.prober import Prober, ProbeWork
from asyppo_async.types import SamplingParams

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_tokens=0, max_tokens=4, stop_token_ids=())


class FullEngine(ScriptedEngine):
    """Scores nothing before `make_room`."""

    def __init__(self) -> None:
        super().__init__(Script(vocab_size=64))
        self.has_room = asyncio.Event()

    async def score(self, token_ids, *, request_id, cache_salt):
        await self.has_room.wait()
        return await super().score(token_ids, request_id=request_id, cache_salt=cache_salt)

    async def make_room(self) -> None:
        await super().make_room()
        self.has_room.set()


def work(deadline_s: float) -> ProbeWork:
    ids = np.arange(5, dtype=np.int32)
    return ProbeWork(fixed=(ids,), prompts=(ids,), sampling=SAMPLING, deadline_s=deadline_s)


async def test_probe_when_the_running_requests_leave_no_kv_then_they_are_put_back_once() -> None:
    engine = FullEngine()
    outcome = await Prober(engine, 2).run(work(deadline_s=2.0), 0, "salt")
    assert [len(scores) for scores in outcome.fixed_logprobs] == [4]
    assert engine.seen.count("room") == 1


async def test_probe_when_there_is_room_then_nothing_is_put_back() -> None:
    engine = FullEngine()
    engine.has_room.set()
    await Prober(engine, 2).run(work(deadline_s=20.0), 0, "salt")
    assert "room" not in engine.seen


@pytest.mark.parametrize("point", ["room", "score"])
async def test_probe_when_the_engine_fails_then_its_words_are_told(point: str) -> None:
    engine = FullEngine()
    engine.faults[point] = "the worker is gone"
    with pytest.raises(CallError, match="the probe failed: the worker is gone"):
        await Prober(engine, 2).run(work(deadline_s=2.0), 0, "salt")
