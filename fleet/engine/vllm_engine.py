"""vLLM's `AsyncLLM` in this process, behind the `Engine` protocol."""

import asyncio
import contextlib
import gc
import multiprocessing
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import numpy as np

from asyppo_async.concurrency import beside
from asyppo_async.config.serve import ServeConfig
from asyppo_async.errors import FleetError
from asyppo_async.fleet.engine.protocol import (
    Delta,
    DirectPlace,
    EngineFault,
    EngineInfo,
    EngineRefused,
    KvOnUpdate,
    SampleRequest,
    StagedWeights,
    WeightsLabel,
)
from asyppo_async.fleet.engine.vllm_adapters import VllmAdapters
from asyppo_async.fleet.engine.vllm_failures import vllm_failures
from asyppo_async.fleet.engine.vllm_held_tokens import HeldTokens
from asyppo_async.fleet.engine.vllm_meter import KvMeter
from asyppo_async.fleet.engine.vllm_options import (
    engine_args,
    prepare_environment,
    request_params,
    score_params,
)
from asyppo_async.fleet.engine.vllm_outputs import delta_of
from asyppo_async.fleet.engine.vllm_replicas import Replicas, agreed
from asyppo_async.fleet.engine.vllm_thread import EngineThread
from asyppo_async.fleet.engine.vllm_versions import VersionReader, label_text
from asyppo_async.fleet.engine.vllm_weights import VllmWeights, worker_errors
from asyppo_async.types import Float32Array, Int32Array, SamplingParams
from asyppo_async.weights.manifest import manifest_of_checkpoint

FIRST_LABEL = WeightsLabel(version=0, load=0)

_WARM_UP_TOKENS = 8
_FIRST = -1
"""vLLM's priority of what goes first; that of all else is 0."""
_SHUTDOWN_S = 15
"""vLLM's processes need several seconds to end on a busy machine, and are killed after this."""


@contextlib.asynccontextmanager
async def open_vllm_engine(config: ServeConfig) -> AsyncIterator["VllmEngine"]:
    """Start the engine, warm it up, and end its processes on the way out.

    Raises:
        ConfigError: the settings or the environment do not allow it.
        FleetError: vLLM did not start; the message carries its own words.
    """
    prepare_environment(config)
    thread = EngineThread()
    try:
        kv_meter = KvMeter()
        engine = VllmEngine(await thread.run(lambda: _build(config, kv_meter)), config, kv_meter)
    except asyncio.CancelledError:
        _kill_children()
        raise
    try:
        await engine.warm_up()
        # Half of the time is the outbox's.
        async with beside(engine.held_tokens(config.chunk_s / 2).run()):
            yield engine
    finally:
        await engine.stop_listening()
        await asyncio.shield(thread.run(engine.shutdown))
        thread.end()


def _build(config: ServeConfig, kv_meter: KvMeter) -> Any:
    from vllm.v1.engine.async_llm import AsyncLLM

    args = engine_args(config)
    try:
        return AsyncLLM.from_engine_args(args, stat_loggers=[kv_meter.logger_of])
    except Exception as error:
        raise FleetError(
            f"vLLM did not start with {config.model}: {type(error).__name__}: {error}"
        ) from error


def _kill_children() -> None:
    """End an engine that is still starting; its own workers follow it."""
    for child in multiprocessing.active_children():
        child.kill()


class VllmEngine:
    """The `Engine` of a real server. Made by `open_vllm_engine`."""

    def __init__(self, llm: Any, config: ServeConfig, kv_meter: KvMeter) -> None:
        self._llm = llm
        self._kv_meter = kv_meter
        self._weights = VllmWeights(llm)
        self._adapters: VllmAdapters | None = None
        if config.enable_lora:
            self._adapters = VllmAdapters(llm, manifest_of_checkpoint(config.model, config.dtype))
        self._staged: VllmWeights | VllmAdapters = self._adapters or self._weights
        """What loads the versions that arrive in host memory."""
        self._failures = vllm_failures()
        self._replicas = Replicas(config.data_parallel_size)
        self._dtype = config.dtype
        self._info = EngineInfo(
            vocab_size=int(llm.model_config.get_vocab_size()),
            max_model_len=int(llm.model_config.max_model_len),
            num_workers=config.num_workers,
            max_kept_tokens=config.max_kept_tokens,
            max_lora_rank=config.max_lora_rank if config.enable_lora else 0,
            returns_routed_experts=False,  # vLLM's runner V2 alone says which, and needs Triton
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def kv_cache_usage(self) -> float:
        return self._kv_meter.usage

    async def ask(self) -> None:
        await self._llm.is_paused()

    async def warm_up(self) -> None:
        """Run every path once: the first request of a CPU engine compiles its kernels, for up to half a minute."""
        await self.set_label(FIRST_LABEL)
        if self._adapters is not None:
            await self._adapters.start()
        length = max(1, min(32, self._info.max_model_len - _WARM_UP_TOKENS))
        ids = np.arange(length, dtype=np.int32) % self._info.vocab_size
        sampling = SamplingParams(
            temperature=1.0, top_p=1.0, top_k=0, min_tokens=0, max_tokens=_WARM_UP_TOKENS, stop_token_ids=()
        )
        request = SampleRequest(id="warm-up", prompt_token_ids=ids, sampling=sampling, cache_salt="warm-up")
        async for _ in self.generate(request):
            pass
        if length > 1:
            await self.score(ids, request_id="warm-up-score", cache_salt="warm-up")

    async def generate(self, request: SampleRequest) -> AsyncGenerator[Delta, None]:
        max_tokens = min(
            request.sampling.max_tokens, self._info.max_model_len - len(request.prompt_token_ids)
        )
        if max_tokens < 1:
            raise EngineRefused(
                f"a prompt of {len(request.prompt_token_ids)} tokens leaves no room for a response: prompt and "
                f"response hold at most {self._info.max_model_len} tokens"
            )
        versions = VersionReader(self._llm.output_processor, request.id)
        params = request_params(request.sampling, max_tokens, return_kept_tokens=request.return_kept_tokens)
        prompt = _prompt(request.prompt_token_ids, request.cache_salt)
        priority = _FIRST if request.goes_first else 0
        with self._failures.translated(request.id), self._replicas.place() as replica:
            stream = self._llm.generate(
                prompt,
                params,
                request.id,
                lora_request=self._adapter,
                priority=priority,
                data_parallel_rank=replica,
            )
            async with contextlib.aclosing(stream):
                async for output in stream:
                    yield delta_of(
                        request.id, output.outputs[0], versions, with_kept=request.return_kept_tokens
                    )

    def held_tokens(self, longest_s: float) -> HeldTokens:
        return HeldTokens(self._llm.output_processor, longest_s)

    async def score(self, token_ids: Int32Array, *, request_id: str, cache_salt: str) -> Float32Array:
        """By every replica, which have to agree."""
        prompt = _prompt(token_ids, cache_salt)
        scores = [
            self._score(prompt, token_ids, f"{request_id}-{replica}" if replica else request_id, replica)
            for replica in self._replicas.all
        ]
        return agreed(await asyncio.gather(*scores), self._dtype)

    async def _score(
        self, prompt: Any, token_ids: Int32Array, request_id: str, replica: int | None
    ) -> Float32Array:
        stream = self._llm.generate(
            prompt,
            score_params(),
            request_id,
            lora_request=self._adapter,
            priority=_FIRST,
            data_parallel_rank=replica,
        )
        with self._failures.translated(request_id):
            async with contextlib.aclosing(stream):
                async for output in stream:
                    entries = output.prompt_logprobs
                    if output.finished and entries is not None and len(entries) == len(token_ids):
                        pairs = zip(entries[1:], token_ids[1:].tolist(), strict=True)
                        return np.array([entry[token].logprob for entry, token in pairs], dtype=np.float32)
        raise EngineFault(
            f"request {request_id} ended without a log-prob for each of its {len(token_ids)} tokens"
        )

    async def make_room(self) -> None:
        with worker_errors("make room"):
            await self._llm.reset_prefix_cache(reset_running_requests=True)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._llm.abort(list(request_ids))

    async def verify_staged(self, staged: StagedWeights) -> None:
        await self._staged.verify_staged(staged)

    async def pause(self, kv_on_update: KvOnUpdate) -> None:
        with worker_errors("pause"):
            await self._llm.pause_generation(mode="keep", clear_cache=kv_on_update == "recompute")

    async def load_staged(self, staged: StagedWeights, label: WeightsLabel) -> None:
        await self._staged.load_staged(staged, label)

    async def join_direct(self, place: DirectPlace) -> None:
        await self._weights.join_direct(place)

    async def receive_direct(self, deadline_s: float) -> None:
        await self._weights.receive_direct(deadline_s)

    async def finish_direct(self, checksums: Sequence[int], label: WeightsLabel) -> None:
        await self._weights.finish_direct(checksums, label)

    async def abort_direct(self, reason: str) -> None:
        await self._weights.leave_update(reason)

    async def leave_direct(self) -> None:
        await self._weights.leave_direct()

    async def resume(self) -> None:
        with worker_errors("resume"):
            await self._llm.resume_generation()

    async def set_label(self, label: WeightsLabel) -> None:
        with worker_errors(f"name the weights {label_text(label)}"):
            await self._llm.update_weight_version(label_text(label))

    async def stop_listening(self) -> None:
        """End vLLM's reader of outputs first, or it would report the shutdown as the engine's death."""
        handler = self._llm.output_handler
        if handler is not None:
            handler.cancel()
            await asyncio.wait([handler])

    def shutdown(self) -> None:
        llm, self._llm = self._llm, None
        if self._adapters is not None:
            self._adapters.close()
        del self._weights, self._adapters, self._staged
        llm.shutdown(timeout=_SHUTDOWN_S)
        del llm
        gc.collect()  # vLLM's object is part of a cycle, and its finalizer fails in an interpreter that ends

    async def wait_failed(self) -> str:
        handler = self._llm.output_handler
        if handler is None:
            raise AssertionError("the engine was not warmed up")
        await asyncio.wait([handler])
        return "vLLM's engine process died; its own words are in the log above"

    @property
    def _adapter(self) -> Any:
        """What every request names; None: the engine has no adapters."""
        return None if self._adapters is None else self._adapters.request


def _prompt(token_ids: Int32Array, cache_salt: str) -> Any:
    from vllm.inputs.engine import tokens_input

    return tokens_input(token_ids.tolist(), cache_salt=cache_salt)
