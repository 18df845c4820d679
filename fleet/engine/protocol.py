"""What the fleet server needs of an inference engine, and the values that pass between them.

One load of weights is named by a `WeightsLabel`. Its `load` number grows with every load of bytes, so that two loads
of the same version (a repeated publication) are never taken for one another; `version` is what the trainer counts.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from asyppo_async.types import Float32Array, Int32Array, SamplingParams
from asyppo_async.weights.manifest import Manifest

KvOnUpdate = Literal["keep", "recompute"]
EndOfSample = Literal["stop", "length", "aborted"]


class EngineRefused(Exception):
    """The engine does not take this request; the message says why."""


class EngineDead(Exception):
    """The engine is gone; no request of it can be answered."""


class EngineFault(Exception):
    """The engine contradicted itself or failed on one request; what it said of that request cannot be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLabel:
    version: int
    load: int
    """Loads of bytes since the server started; 0 is the checkpoint that it was started with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelRun:
    """So many consecutive tokens were sampled under one label."""

    label: WeightsLabel
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The next tokens of a sample."""

    token_ids: Int32Array
    logprobs: Float32Array
    """Log-prob of each token under the distribution that it was sampled from."""
    runs: tuple[LabelRun, ...]
    """Their `num_tokens` add up to the number of tokens."""
    end: EndOfSample | None
    """Set in the last delta of a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    id: str
    """Unique among the requests that the engine holds."""
    prompt_token_ids: Int32Array
    sampling: SamplingParams
    cache_salt: str
    """KV is shared between requests of the same salt only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedWeights:
    """All bytes of one version, laid out as `manifest` says, in memory that the engine's processes can map."""

    process_id: int
    file_descriptor: int
    """Of process `process_id`; reached through /proc."""
    num_bytes: int
    manifest: Manifest
    checksums: tuple[int, ...]
    """CRC-32 of each tensor, in manifest order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    vocab_size: int
    max_model_len: int
    num_workers: int
    """Processes that receive weights."""


class Engine(Protocol):
    @property
    def info(self) -> EngineInfo: ...

    def generate(self, request: SampleRequest) -> AsyncGenerator[Delta, None]:
        """Sample one response; closing the iterator early aborts the request.

        Raises:
            EngineRefused: the request does not fit the engine.
            EngineFault: what the engine says of this request cannot be trusted.
            EngineDead: the engine ended.
        """
        ...

    async def score(self, token_ids: Int32Array, *, request_id: str, cache_salt: str) -> Float32Array:
        """Log-prob of every token but the first at temperature 1, from one prefill: [len - 1]."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; each of their iterators yields a last delta with `end = "aborted"`."""
        ...

    async def verify_staged(self, staged: StagedWeights) -> None:
        """Map the staged bytes in every worker and compare their checksums; touches no served weight.

        Raises:
            WeightSyncError: a checksum differs, or the bytes cannot be mapped.
        """
        ...

    async def pause(self, kv_on_update: KvOnUpdate) -> None:
        """Stop scheduling and return when all that was sampled so far has been delivered; requests are kept."""
        ...

    async def load_staged(self, staged: StagedWeights, label: WeightsLabel) -> None:
        """Load verified bytes; what is sampled from then on carries `label`. Needs a pause.

        Raises:
            WeightSyncError: the weights are a mixture until a later load succeeds.
        """
        ...

    async def resume(self) -> None: ...

    async def set_label(self, label: WeightsLabel) -> None:
        """Name the loaded weights anew; no byte changes."""
        ...

    async def wait_failed(self) -> str:
        """Return, with the reason, when the engine has died; never otherwise."""
        ...
