"""An engine without a model: tokens by a rule, failures at chosen points. For fault injection behind the real server.

Token `i` of a response is `(sum(prompt) + 7 i + 13 load) mod vocab_size`, its log-prob `-(1 + load + i / 1000)`, so a
test can tell from either which load of weights it came from. Scores are `-(1 + load)` per token.
"""

import asyncio
import zlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from asyppo_async.errors import WeightSyncError
from asyppo_async.fleet.engine.protocol import (
    Delta,
    EndOfSample,
    EngineDead,
    EngineInfo,
    EngineRefused,
    KvOnUpdate,
    LabelRun,
    SampleRequest,
    StagedWeights,
    WeightsLabel,
)
from asyppo_async.types import Float32Array, Int32Array

FaultPoint = Literal["verify", "pause", "load", "resume", "label", "score"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    vocab_size: int = 64
    max_model_len: int = 512
    tokens_per_delta: int = 4
    delta_delay_s: float = 0.0
    """Time that each delta takes."""
    verify_s: float = 0.0
    load_s: float = 0.0


@dataclass(slots=True)
class _Running:
    request: SampleRequest
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedEngine:
    """`faults` is taken from and `seen` is added to while it runs; both are the test's."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._label = WeightsLabel(version=0, load=0)
        self._scheduled = asyncio.Event()
        self._scheduled.set()
        self._running: dict[str, _Running] = {}
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.faults: dict[FaultPoint, str] = {}
        """Points at which the next call raises, with the message."""
        self.seen: list[str] = []
        """What was called, in order."""
        self.max_running = 0

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            vocab_size=self._script.vocab_size, max_model_len=self._script.max_model_len, num_workers=1
        )

    @property
    def running_ids(self) -> list[str]:
        return list(self._running)

    def die(self, reason: str) -> None:
        if not self._death.done():
            self._death.set_result(reason)
        for running in self._running.values():
            running.aborted.set()

    async def generate(self, request: SampleRequest) -> AsyncGenerator[Delta, None]:
        room = self._script.max_model_len - len(request.prompt_token_ids)
        num_tokens = min(request.sampling.max_tokens, room)
        if num_tokens < 1:
            raise EngineRefused(f"a prompt of {len(request.prompt_token_ids)} tokens leaves no room")
        running = self._running[request.id] = _Running(request)
        self.max_running = max(self.max_running, len(self._running))
        self.seen.append(f"generate {request.id} {request.cache_salt}")
        try:
            position = 0
            end: EndOfSample | None = None
            while end is None:
                if not await self._scheduled_before_abort(running):
                    yield self._nothing_more()
                    return
                delta = self._next(request, position, num_tokens)
                position += len(delta.token_ids)
                end = delta.end
                yield delta
        finally:
            del self._running[request.id]

    async def score(self, token_ids: Int32Array, *, request_id: str, cache_salt: str) -> Float32Array:
        self._visit("score", f"score {request_id} {cache_salt}")
        return np.full(len(token_ids) - 1, -1.0 - self._label.load, dtype=np.float32)

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.seen.append(f"abort {request_id}")
            if request_id in self._running:
                self._running[request_id].aborted.set()

    async def verify_staged(self, staged: StagedWeights) -> None:
        self._visit("verify", "verify")
        await asyncio.sleep(self._script.verify_s)
        data = await asyncio.to_thread(
            Path(f"/proc/{staged.process_id}/fd/{staged.file_descriptor}").read_bytes
        )
        for spec, offset, expected in zip(
            staged.manifest.tensors, staged.manifest.offsets, staged.checksums, strict=True
        ):
            if zlib.crc32(data[offset : offset + spec.num_bytes]) != expected:
                raise WeightSyncError(f"checksum of {spec.name} differs")

    async def pause(self, kv_on_update: KvOnUpdate) -> None:
        self._visit("pause", f"pause {kv_on_update}")
        self._scheduled.clear()

    async def load_staged(self, staged: StagedWeights, label: WeightsLabel) -> None:
        self._visit("load", f"load {label.version}")
        await asyncio.sleep(self._script.load_s)
        self._label = label

    async def resume(self) -> None:
        self._visit("resume", "resume")
        self._scheduled.set()

    async def set_label(self, label: WeightsLabel) -> None:
        self._visit("label", f"label {label.version}")
        self._label = label

    async def wait_failed(self) -> str:
        return await asyncio.shield(self._death)

    def _visit(self, point: FaultPoint, what: str) -> None:
        self.seen.append(what)
        if point in self.faults:
            raise WeightSyncError(self.faults.pop(point))

    async def _scheduled_before_abort(self, running: _Running) -> bool:
        """Take one delta's time, paused or not; False if the request was aborted meanwhile."""
        while True:
            try:
                async with asyncio.timeout(self._script.delta_delay_s):
                    await running.aborted.wait()
            except TimeoutError:
                pass
            if self._death.done():
                raise EngineDead(self._death.result())
            if running.aborted.is_set():
                return False
            if self._scheduled.is_set():
                return True
            await self._scheduled_or_aborted(running)

    async def _scheduled_or_aborted(self, running: _Running) -> None:
        async with asyncio.TaskGroup() as tasks:
            waits = [
                tasks.create_task(self._scheduled.wait()),
                tasks.create_task(running.aborted.wait()),
            ]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for each in waits:
                each.cancel()

    def _next(self, request: SampleRequest, position: int, num_tokens: int) -> Delta:
        indices = np.arange(position, min(position + self._script.tokens_per_delta, num_tokens))
        first = int(request.prompt_token_ids.sum()) + 13 * self._label.load
        token_ids = ((first + 7 * indices) % self._script.vocab_size).astype(np.int32)
        stops = np.flatnonzero(np.isin(token_ids, request.sampling.stop_token_ids))
        end: EndOfSample | None = "length" if position + len(token_ids) == num_tokens else None
        if len(stops):
            token_ids, end = token_ids[: int(stops[0]) + 1], "stop"
        logprobs = -(1.0 + self._label.load + indices[: len(token_ids)] / 1000.0)
        return Delta(
            token_ids=token_ids,
            logprobs=logprobs.astype(np.float32),
            runs=(LabelRun(label=self._label, num_tokens=len(token_ids)),),
            end=end,
        )

    def _nothing_more(self) -> Delta:
        return Delta(
            token_ids=np.zeros(0, dtype=np.int32),
            logprobs=np.zeros(0, dtype=np.float32),
            runs=(),
            end="aborted",
        )
