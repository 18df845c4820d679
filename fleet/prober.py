"""Scoring and sampling with weights on probation: past the queue and the gate, on slots that are kept free for it."""

import asyncio
import contextlib
import itertools
import logging
import time
from dataclasses import dataclass

import numpy as np

from asyppo_async.errors import WeightSyncError
from asyppo_async.fleet.call_error import CallError
from asyppo_async.fleet.engine.protocol import (
    Delta,
    Engine,
    EngineDead,
    EngineFault,
    EngineRefused,
    SampleRequest,
)
from asyppo_async.types import Float32Array, Int32Array, SamplingParams

logger = logging.getLogger(__name__)

_ROOM_AFTER_SHARE = 0.25
"""Of the deadline: how long a probe waits for the running requests to leave it KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeWork:
    fixed: tuple[Int32Array, ...]
    """Sequences to score, each at least two tokens."""
    prompts: tuple[Int32Array, ...]
    """To be continued by sampling."""
    sampling: SamplingParams
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOutcome:
    fixed_logprobs: tuple[Float32Array, ...]
    """[length - 1] each."""
    sampled: tuple[Delta, ...]
    """Whole responses."""
    probe_s: float


class Prober:
    def __init__(self, engine: Engine, num_slots: int) -> None:
        self._engine = engine
        self._num_slots = num_slots
        self._ids = itertools.count()

    async def run(self, work: ProbeWork, load: int, cache_salt: str) -> ProbeOutcome:
        """Raise `CallError` if the engine fails, is late, or samples from another load than `load`."""
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(work.deadline_s):
                scores, samples = await self._run_all(work, load, cache_salt)
        except TimeoutError as error:
            raise CallError(
                "DEADLINE_EXCEEDED", f"the probe was not answered within {work.deadline_s:g} s"
            ) from error
        return ProbeOutcome(fixed_logprobs=scores, sampled=samples, probe_s=time.monotonic() - started_s)

    async def _run_all(
        self, work: ProbeWork, load: int, cache_salt: str
    ) -> tuple[tuple[Float32Array, ...], tuple[Delta, ...]]:
        slots = asyncio.Semaphore(self._num_slots)
        try:
            async with asyncio.TaskGroup() as tasks:
                scores = [tasks.create_task(self._score(ids, cache_salt, slots)) for ids in work.fixed]
                samples = [
                    tasks.create_task(self._continue(ids, work.sampling, load, cache_salt, slots))
                    for ids in work.prompts
                ]
                room = tasks.create_task(self._make_room(work.deadline_s * _ROOM_AFTER_SHARE))
                await asyncio.wait([*scores, *samples])
                room.cancel()
        except* (EngineRefused, EngineFault, EngineDead, WeightSyncError) as group:
            raise CallError("INTERNAL", f"the probe failed: {group.exceptions[0]}") from group
        return tuple(task.result() for task in scores), tuple(task.result() for task in samples)

    async def _make_room(self, after_s: float) -> None:
        """The engine takes KV from nobody for a request that waits, and those that run may need all of it for long."""
        await asyncio.sleep(after_s)
        logger.warning("the probe has waited for %.1f s: all running requests are put back for it", after_s)
        await self._engine.make_room()

    async def _score(self, token_ids: Int32Array, cache_salt: str, slots: asyncio.Semaphore) -> Float32Array:
        async with slots:
            return await self._engine.score(token_ids, request_id=self._next_id(), cache_salt=cache_salt)

    async def _continue(
        self,
        prompt: Int32Array,
        sampling: SamplingParams,
        load: int,
        cache_salt: str,
        slots: asyncio.Semaphore,
    ) -> Delta:
        request = SampleRequest(
            id=self._next_id(),
            prompt_token_ids=prompt,
            sampling=sampling,
            cache_salt=cache_salt,
            goes_first=True,
        )
        async with slots, contextlib.aclosing(self._engine.generate(request)) as stream:
            deltas = [delta async for delta in stream]
        runs = tuple(run for delta in deltas for run in delta.runs)
        if any(run.label.load != load for run in runs):
            raise EngineFault(f"a probe of load {load} was sampled from {runs}")
        return Delta(
            token_ids=np.concatenate([delta.token_ids for delta in deltas]),
            logprobs=np.concatenate([delta.logprobs for delta in deltas]),
            runs=runs,
            end=deltas[-1].end,
        )

    def _next_id(self) -> str:
        return f"probe-{next(self._ids)}"
