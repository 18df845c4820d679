"""vLLM's `AsyncLLM` in this process, behind the `Engine` protocol."""

import asyncio
import contextlib
import gc
import multiprocessing
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyppo_async.config.serve import ServeConfig
from asyppo_async.errors import FleetError, WeightSyncError
from asyppo_async.fleet.engine.protocol import (
    Delta,
    EndOfSample,
    EngineDead,
    EngineFault,
    EngineInfo,
    EngineRefused,
    KvOnUpdate,
    SampleRequest,
    StagedWeights,
    WeightsLabel,
)
from asyppo_async.fleet.engine.vllm_options import (
    engine_args,
    prepare_environment,
    request_params,
    score_params,
)
from asyppo_async.fleet.engine.vllm_thread import EngineThread
from asyppo_async.fleet.engine.vllm_versions import VersionReader, label_text
from asyppo_async.types import Float32Array, Int32Array, SamplingParams

FIRST_LABEL = WeightsLabel(version=0, load=0)

_WARM_UP_TOKENS = 8
_SHUTDOWN_S = 15
"""vLLM's processes need several seconds to end on a busy machine, and are killed after this."""
_ENDS: dict[str, EndOfSample] = {"stop": "stop", "length": "length", "abort": "aborted"}


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
        engine = VllmEngine(await thread.run(lambda: _build(config)), config)
    except asyncio.CancelledError:
        _kill_children()
        raise
    try:
        await engine.warm_up()
        yield engine
    finally:
        await engine.stop_listening()
        await asyncio.shield(thread.run(engine.shutdown))
        thread.end()


def _build(config: ServeConfig) -> Any:
    from vllm.v1.engine.async_llm import AsyncLLM

    args = engine_args(config)
    try:
        return AsyncLLM.from_engine_args(args)
    except Exception as error:
        raise FleetError(
            f"vLLM did not start with {config.model}: {type(error).__name__}: {error}"
        ) from error


def _kill_children() -> None:
    """End an engine that is still starting; its own workers follow it."""
    for child in multiprocessing.active_children():
        child.kill()


@dataclass(frozen=True, slots=True)
class _Failures:
    """vLLM's exceptions; imported with vLLM, not with this module."""

    dead: type[Exception]
    generate: type[Exception]
    refused: type[Exception]


def _failures() -> _Failures:
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    return _Failures(EngineDeadError, EngineGenerateError, VLLMClientError)


class VllmEngine:
    """The `Engine` of a real server. Made by `open_vllm_engine`."""

    def __init__(self, llm: Any, config: ServeConfig) -> None:
        self._llm = llm
        self._failures = _failures()
        self._info = EngineInfo(
            vocab_size=int(llm.model_config.get_vocab_size()),
            max_model_len=int(llm.model_config.max_model_len),
            num_workers=config.tensor_parallel_size,
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def warm_up(self) -> None:
        """Run every path once: the first request of a CPU engine compiles its kernels, for up to half a minute."""
        await self.set_label(FIRST_LABEL)
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
        params = request_params(request.sampling, max_tokens)
        stream = self._llm.generate(_prompt(request.prompt_token_ids, request.cache_salt), params, request.id)
        with self._translated(request.id):
            async with contextlib.aclosing(stream):
                async for output in stream:
                    yield _delta(request.id, output.outputs[0], versions)

    async def score(self, token_ids: Int32Array, *, request_id: str, cache_salt: str) -> Float32Array:
        stream = self._llm.generate(_prompt(token_ids, cache_salt), score_params(), request_id)
        with self._translated(request_id):
            async with contextlib.aclosing(stream):
                async for output in stream:
                    entries = output.prompt_logprobs
                    if output.finished and entries is not None and len(entries) == len(token_ids):
                        pairs = zip(entries[1:], token_ids[1:].tolist(), strict=True)
                        return np.array([entry[token].logprob for entry, token in pairs], dtype=np.float32)
        raise EngineFault(
            f"request {request_id} ended without a log-prob for each of its {len(token_ids)} tokens"
        )

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._llm.abort(list(request_ids))

    async def verify_staged(self, staged: StagedWeights) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        specs = staged.manifest.tensors
        init_info = {
            "process_id": staged.process_id,
            "file_descriptor": staged.file_descriptor,
            "num_bytes": staged.num_bytes,
            "names": [spec.name for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "dtypes": [spec.dtype for spec in specs],
            "offsets": list(staged.manifest.offsets),
            "checksums": list(staged.checksums),
        }
        with self._worker_errors("verify the staged weights"):
            await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))

    async def pause(self, kv_on_update: KvOnUpdate) -> None:
        with self._worker_errors("pause"):
            await self._llm.pause_generation(mode="keep", clear_cache=kv_on_update == "recompute")

    async def load_staged(self, staged: StagedWeights, label: WeightsLabel) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        with self._worker_errors(f"load version {label.version} ({len(staged.manifest.tensors)} tensors)"):
            await self._llm.start_weight_update()
            try:
                await self._llm.update_weights(WeightTransferUpdateRequest(update_info={}))
                await self._llm.finish_weight_update(weight_version=label_text(label))
            except Exception:
                # Only a failing `update_weights` makes a worker leave an update that has started.
                abort = WeightTransferUpdateRequest(update_info={"abort": f"load of version {label.version}"})
                with contextlib.suppress(Exception):
                    await self._llm.update_weights(abort)
                raise

    async def resume(self) -> None:
        with self._worker_errors("resume"):
            await self._llm.resume_generation()

    async def set_label(self, label: WeightsLabel) -> None:
        with self._worker_errors(f"name the weights {label_text(label)}"):
            await self._llm.update_weight_version(label_text(label))

    async def stop_listening(self) -> None:
        """End vLLM's reader of outputs first, or it would report the shutdown as the engine's death."""
        handler = self._llm.output_handler
        if handler is not None:
            handler.cancel()
            await asyncio.wait([handler])

    def shutdown(self) -> None:
        llm, self._llm = self._llm, None
        llm.shutdown(timeout=_SHUTDOWN_S)
        del llm
        gc.collect()  # vLLM's object is part of a cycle, and its finalizer fails in an interpreter that ends

    async def wait_failed(self) -> str:
        handler = self._llm.output_handler
        if handler is None:
            raise AssertionError("the engine was not warmed up")
        await asyncio.wait([handler])
        return "vLLM's engine process died; its own words are in the log above"

    @contextlib.contextmanager
    def _translated(self, request_id: str) -> Iterator[None]:
        try:
            yield
        except self._failures.dead as error:
            raise EngineDead(f"request {request_id}: vLLM's engine process died") from error
        except self._failures.generate as error:
            cause = error.__cause__ or error
            raise EngineFault(f"request {request_id}: {type(cause).__name__}: {cause}") from error
        except (self._failures.refused, ValueError) as error:
            raise EngineRefused(f"request {request_id}: {error}") from error

    @contextlib.contextmanager
    def _worker_errors(self, what: str) -> Iterator[None]:
        """vLLM reports a worker's exception as a plain one with its text."""
        try:
            yield
        except Exception as error:
            raise WeightSyncError(f"the engine failed to {what}: {error}") from error


def _prompt(token_ids: Int32Array, cache_salt: str) -> Any:
    from vllm.inputs.engine import tokens_input

    return tokens_input(token_ids.tolist(), cache_salt=cache_salt)


def _delta(request_id: str, completion: Any, versions: VersionReader) -> Delta:
    token_ids = list(completion.token_ids)
    logprobs = completion.logprobs if token_ids else None
    if token_ids and (logprobs is None or list(logprobs.token_ids) != token_ids):
        raise EngineFault(f"request {request_id}: the log-probs are not those of the sampled tokens")
    end: EndOfSample | None = None
    if completion.finish_reason is not None:
        if completion.finish_reason not in _ENDS:
            raise EngineFault(f"request {request_id} ended with {completion.finish_reason!r}")
        end = _ENDS[completion.finish_reason]
    return Delta(
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=np.array(logprobs.logprobs if logprobs is not None else [], dtype=np.float32),
        runs=versions.take(len(token_ids), completion.weight_versions),
        end=end,
    )
