"""What the fleet server needs of an inference engine, and the values that pass between them.

One load of weights is named by a `WeightsLabel`. Its `load` number grows with every load of bytes, so that two loads
of the same version (a repeated publication) are never taken for one another; `version` is what the trainer counts.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from asyppo_async.types import Float32Array, Int16Array, Int32Array, KeptTokens, SamplingParams
from asyppo_async.weights.group import TransferBackend
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
    kept: KeptTokens | None = None
    """Where they were asked for: what each token was sampled from."""
    routed_experts: Int16Array | None = None
    """Where they were asked for, in the last delta: [prompt + response - 1, layers, experts per token]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    id: str
    """Unique among the requests that the engine holds."""
    prompt_token_ids: Int32Array
    sampling: SamplingParams
    cache_salt: str
    """KV is shared between requests of the same salt only."""
    return_kept_tokens: bool = False
    return_routed_experts: bool = False
    goes_first: bool = False
    """Scheduled before all that waits in the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedWeights:
    """All bytes of one version, laid out as `manifest` says, in memory that the engine's processes can map."""

    process_id: int
    file_descriptor: int
    """Of process `process_id`; reached through /proc."""
    num_bytes: int
    manifest: Manifest
    checksums: tuple[int, ...]
    """XXH3-64 of each tensor, in manifest order."""
    load_names: tuple[str, ...]
    """Tensors of the modules in which something has changed since the last complete load; the others are as they were.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectPlace:
    """Where the engine's workers join a process group themselves, as the ranks from `first_rank` on."""

    backend: TransferBackend
    store_host: str
    store_port: int
    first_rank: int
    world_size: int
    epoch: int
    manifest: Manifest
    bucket_bytes: int
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    vocab_size: int
    max_model_len: int
    num_workers: int
    """Processes that receive weights."""
    max_kept_tokens: int
    """Largest top_k of which it can say what was kept."""
    returns_routed_experts: bool
    max_lora_rank: int = 0
    """Largest rank of the adapters that are its versions; 0: its versions are whole weights."""


class Engine(Protocol):
    @property
    def info(self) -> EngineInfo: ...

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV cache in use, 0 to 1; negative: not known."""
        ...

    async def ask(self) -> None:
        """Return when the engine's own loop has answered, also while it is paused. The caller sets the deadline."""
        ...

    def generate(self, request: SampleRequest) -> AsyncGenerator[Delta, None]:
        """Sample one response; closing the iterator early aborts the request.

        Raises:
            EngineRefused: the request does not fit the engine.
            EngineFault: what the engine says of this request cannot be trusted.
            EngineDead: the engine ended.
        """
        ...

    async def score(self, token_ids: Int32Array, *, request_id: str, cache_salt: str) -> Float32Array:
        """Log-prob of every token but the first at temperature 1, from one prefill: [len - 1]. It goes first."""
        ...

    async def make_room(self) -> None:
        """Let all running requests wait, without KV, behind those that go first; they compute theirs again."""
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
        """Load the verified tensors that it names; what is sampled from then on carries `label`. Needs a pause.

        Raises:
            WeightSyncError: the weights are a mixture until a later load succeeds.
        """
        ...

    async def join_direct(self, place: DirectPlace) -> None:
        """Let every worker meet the process group; touches no served weight.

        Raises:
            WeightSyncError: not all ranks met within the deadline.
        """
        ...

    async def receive_direct(self, deadline_s: float) -> None:
        """Begin an update and load every bucket as it arrives, in every worker. Needs a pause.

        Raises:
            WeightSyncError: the weights are a mixture until a later load succeeds; the update has been left.
        """
        ...

    async def finish_direct(self, checksums: Sequence[int], label: WeightsLabel) -> None:
        """Compare what was loaded with the sender's checksums, in every worker, and end the update; errors as above."""
        ...

    async def abort_direct(self, reason: str) -> None:
        """Leave an update that was received and will not be finished: the weights are a mixture."""
        ...

    async def leave_direct(self) -> None:
        """Leave the process group; never fails."""
        ...

    async def resume(self) -> None: ...

    async def set_label(self, label: WeightsLabel) -> None:
        """Name the loaded weights anew; no byte changes."""
        ...

    async def wait_failed(self) -> str:
        """Return, with the reason, when the engine has died; never otherwise."""
        ...
