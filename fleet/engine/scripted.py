"""An engine without a model: tokens by a rule, failures at chosen points. For fault injection behind the real server.

Token `i` of a response is `(sum(prompt) + 7 i + 13 m) mod vocab_size`, its log-prob `-(1 + m + i / 1000)`, where `m`
marks the weights, so a test can tell from either which weights it came from. Scores are `-(1 + m)` per token.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash

from asyppo_async.errors import WeightSyncError
from asyppo_async.fleet.engine.protocol import (
    Delta,
    DirectPlace,
    EndOfSample,
    EngineDead,
    EngineFault,
    EngineInfo,
    EngineRefused,
    KvOnUpdate,
    LabelRun,
    SampleRequest,
    StagedWeights,
    WeightsLabel,
)
from asyppo_async.fleet.engine.scripted_worker import ScriptedWorker
from asyppo_async.types import Float32Array, Int16Array, Int32Array, KeptTokens

FaultPoint = Literal["verify", "pause", "load", "resume", "label", "score", "join", "begin", "finish", "room"]

MIXTURE = 999
"""`m` between the begin and the finish of a direct load: nothing of it may ever be seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    vocab_size: int = 64
    max_model_len: int = 512
    tokens_per_delta: int = 4
    delta_delay_s: float = 0.0
    """Time that each delta takes."""
    verify_s: float = 0.0
    load_s: float = 0.0
    num_experts: int = 0
    """A mixture of three layers of so many experts, two for each token; 0: a dense model."""
    max_lora_rank: int = 0
    """Above 0: its versions are adapters."""
    marked_by: Literal["load", "version"] = "load"
    """What `m` is: the number of loads until now, or the version that was loaded last."""


@dataclass(slots=True)
class _Running:
    request: SampleRequest
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedEngine:
    """`faults` is taken from and `seen` is added to while it runs; both are the test's."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._label = WeightsLabel(version=0, load=0)
        self._mark = 0
        self._scheduled = asyncio.Event()
        self._scheduled.set()
        self._running: dict[str, _Running] = {}
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.faults: dict[FaultPoint, str] = {}
        """Points at which the next call raises, with the message."""
        self.seen: list[str] = []
        """What was called, in order."""
        self.prompts: list[list[int]] = []
        """Of every `generate`, in order."""
        self.skew = 0.0
        """Added to every score: an engine that computes something else."""
        self.skew_from = 0
        """From this position on; one that fails with long sequences only."""
        self.max_running = 0
        self.answers = asyncio.Event()
        """Cleared: the engine is stuck, and says nothing to `ask`."""
        self.answers.set()
        self.load_s = script.load_s
        """Time that each load takes."""
        self.faulty: set[int] = set()
        """Positions at which the engine fails on a sample, each once."""
        self.loaded_names: list[tuple[str, ...]] = []
        """Tensors of each staged load."""
        self._direct: ScriptedWorker | None = None

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            vocab_size=self._script.vocab_size,
            max_model_len=self._script.max_model_len,
            num_workers=1,
            max_kept_tokens=self._script.vocab_size,
            returns_routed_experts=self._script.num_experts > 0,
            max_lora_rank=self._script.max_lora_rank,
        )

    @property
    def kv_cache_usage(self) -> float:
        return len(self._running) / 100

    async def ask(self) -> None:
        await self.answers.wait()

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
        self.prompts.append(request.prompt_token_ids.tolist())
        try:
            position = 0
            end: EndOfSample | None = None
            while end is None:
                if not await self._scheduled_before_abort(running):
                    yield self._nothing_more()
                    return
                await self.answers.wait()
                if position in self.faulty:
                    self.faulty.remove(position)
                    raise EngineFault(f"request {request.id}: no logits at position {position}")
                delta = self._next(request, position, num_tokens)
                position += len(delta.token_ids)
                end = delta.end
                yield delta
        finally:
            del self._running[request.id]

    async def score(self, token_ids: Int32Array, *, request_id: str, cache_salt: str) -> Float32Array:
        self._visit("score", f"score {request_id} {cache_salt}")
        scores = np.full(len(token_ids) - 1, -1.0 - self._mark, dtype=np.float32)
        scores[self.skew_from :] += self.skew
        return scores

    async def make_room(self) -> None:
        self._visit("room", "room")

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
        self.loaded_names.append(staged.load_names)
        for spec, offset, expected in zip(
            staged.manifest.tensors, staged.manifest.offsets, staged.checksums, strict=True
        ):
            if xxhash.xxh3_64_intdigest(data[offset : offset + spec.num_bytes]) != expected:
                raise WeightSyncError(f"checksum of {spec.name} differs")

    async def pause(self, kv_on_update: KvOnUpdate) -> None:
        self._visit("pause", f"pause {kv_on_update}")
        self._scheduled.clear()

    async def load_staged(self, staged: StagedWeights, label: WeightsLabel) -> None:
        self._visit("load", f"load {label.version}")
        await asyncio.sleep(self.load_s)
        self._label = label
        self._mark = label.load if self._script.marked_by == "load" else label.version

    async def join_direct(self, place: DirectPlace) -> None:
        self._visit("join", "join")
        self._direct = await asyncio.to_thread(ScriptedWorker, place)

    async def receive_direct(self, deadline_s: float) -> None:
        if self._direct is None:
            raise AssertionError("nobody has joined")
        self._visit("begin", "begin")
        self._mark = MIXTURE
        await asyncio.to_thread(self._direct.receive, deadline_s)
        self.seen.append("received")

    async def finish_direct(self, checksums: Sequence[int], label: WeightsLabel) -> None:
        if self._direct is None:
            raise AssertionError("nobody has joined")
        self._visit("finish", f"finish {label.version}")
        if tuple(checksums) != self._direct.checksums:
            raise WeightSyncError("the bytes of some tensors differ from those sent")
        self._label = label
        self._mark = label.load if self._script.marked_by == "load" else label.version

    async def abort_direct(self, reason: str) -> None:
        self.seen.append("abort update")

    async def leave_direct(self) -> None:
        self.seen.append("leave")
        if self._direct is not None:
            self._direct.group.close()

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
        first = int(request.prompt_token_ids.sum()) + 13 * self._mark
        token_ids = ((first + 7 * indices) % self._script.vocab_size).astype(np.int32)
        stops = np.flatnonzero(np.isin(token_ids, request.sampling.stop_token_ids))
        end: EndOfSample | None = "length" if position + len(token_ids) == num_tokens else None
        if len(stops):
            token_ids, end = token_ids[: int(stops[0]) + 1], "stop"
        logprobs = -(1.0 + self._mark + indices[: len(token_ids)] / 1000.0)
        return Delta(
            token_ids=token_ids,
            logprobs=logprobs.astype(np.float32),
            runs=(LabelRun(label=self._label, num_tokens=len(token_ids)),),
            end=end,
            kept=self._kept(request, token_ids) if request.return_kept_tokens else None,
            routed_experts=self.experts_of(request, position + len(token_ids))
            if request.return_routed_experts and end is not None
            else None,
        )

    def _kept(self, request: SampleRequest, token_ids: Int32Array) -> KeptTokens:
        """The token itself and those after it, `top_k` in all."""
        offsets = np.arange(request.sampling.top_k, dtype=np.int32)
        ids = (token_ids[:, None] + offsets) % self._script.vocab_size
        return KeptTokens(token_ids=ids.ravel(), counts=np.full(len(token_ids), len(offsets), dtype=np.int32))

    def experts_of(self, request: SampleRequest, num_tokens: int) -> Int16Array:
        """By position, layer and place, a rule of their sum."""
        shape = (len(request.prompt_token_ids) + num_tokens - 1, 3, 2)
        places = np.indices(shape, dtype=np.int16).sum(axis=0, dtype=np.int16)
        return np.asarray(places * 7 % self._script.num_experts, dtype=np.int16)

    def _nothing_more(self) -> Delta:
        return Delta(
            token_ids=np.zeros(0, dtype=np.int32),
            logprobs=np.zeros(0, dtype=np.float32),
            runs=(),
            end="aborted",
        )
