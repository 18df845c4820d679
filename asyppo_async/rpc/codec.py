"""Between the messages of the contract and the values of `asyppo_async.types`; what comes in is checked here.

Arrays are packed little-endian bytes: int32 ids, float32 log-probs. Decoders raise `ValueError` with what is wrong; the
callers know which peer and which request it belongs to.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np

from asyppo_async.rpc.per_token import decode_experts, decode_kept, encode_experts, encode_kept, joined_kept
from asyppo_async.rpc.v1 import fleet_pb2
from asyppo_async.types import (
    FinishReason,
    Float32Array,
    Int16Array,
    Int32Array,
    KeptTokens,
    Response,
    SamplingParams,
    VersionRuns,
)
from asyppo_async.weights.manifest import Dtype, Manifest, TensorSpec

_FINISH_REASONS: dict[FinishReason, fleet_pb2.FinishReason] = {
    "stop": fleet_pb2.FINISH_REASON_STOP,
    "length": fleet_pb2.FINISH_REASON_LENGTH,
}
FailureKind = Literal["too_long", "cancelled", "engine_fault"]
_FAILURES: dict[FailureKind, fleet_pb2.SampleErrorKind] = {
    "too_long": fleet_pb2.SAMPLE_ERROR_KIND_TOO_LONG,
    "cancelled": fleet_pb2.SAMPLE_ERROR_KIND_CANCELLED,
    "engine_fault": fleet_pb2.SAMPLE_ERROR_KIND_ENGINE_FAULT,
}
_FAILURE_NAMES = {number: name for name, number in _FAILURES.items()}
_FINISH_REASON_NAMES: dict[fleet_pb2.FinishReason, FinishReason | None] = {
    fleet_pb2.FINISH_REASON_UNSPECIFIED: None,
    **{number: name for name, number in _FINISH_REASONS.items()},
}
_ITEM_BYTES = 4
# Made once: what is done for every message shows in how many one core takes in.
_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFailure:
    """Why one sample of a request ended without being finished."""

    kind: FailureKind
    message: str


@dataclass(slots=True, kw_only=True)
class SampleTokens:
    """The next tokens of one sample: a decoded chunk. Not frozen for the reason that `Response` is not."""

    sample_index: int
    token_ids: Int32Array
    """[n]"""
    behaviour_logprobs: Float32Array
    """[n]"""
    versions: VersionRuns
    """Of n tokens."""
    finish_reason: FinishReason | None
    """None: more follows, or `failure` says why not."""
    failure: SampleFailure | None = None
    kept: KeptTokens | None = None
    """Where they were asked for."""
    routed_experts: Int16Array | None = None
    """[positions, layers, experts per token]; in the last chunk, where they were asked for."""


def pack_ids(token_ids: Sequence[int] | Int32Array) -> bytes:
    return np.ascontiguousarray(token_ids, dtype="<i4").tobytes()


def checksum_of(token_ids: Sequence[int] | Int32Array) -> int:
    """By which two ends see that they mean the same tokens."""
    return zlib.crc32(pack_ids(token_ids))


def unpack_ids(data: bytes) -> Int32Array:
    """Token ids as they came: whoever knows the vocabulary checks that they are in it."""
    if len(data) % _ITEM_BYTES:
        raise _odd_length(data, "token ids")
    return np.frombuffer(data, _INT32)


def pack_logprobs(logprobs: Sequence[float] | Float32Array) -> bytes:
    return np.ascontiguousarray(logprobs, dtype="<f4").tobytes()


def unpack_logprobs(data: bytes) -> Float32Array:
    """Log-probs as they came; see `is_poisoned` for those that are no numbers."""
    if len(data) % _ITEM_BYTES:
        raise _odd_length(data, "log-probs")
    return np.frombuffer(data, _FLOAT32)


def is_poisoned(logprobs: Float32Array) -> bool:
    """Whether a log-prob is NaN or +inf: the engine computed something else than a distribution.

    Such a trajectory is dropped and counted: no mask makes it harmless, since NaN times 0 is NaN.
    """
    return bool(np.isnan(logprobs).any() or np.isposinf(logprobs).any())


def encode_sampling(sampling: SamplingParams) -> fleet_pb2.SamplingParams:
    return fleet_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_tokens=sampling.min_tokens,
        max_tokens=sampling.max_tokens,
        stop_token_ids=sampling.stop_token_ids,
    )


def decode_sampling(message: fleet_pb2.SamplingParams) -> SamplingParams:
    """The wire has float32; what a person wrote as 0.7 comes back as 0.7."""
    return SamplingParams(
        temperature=_shortest(message.temperature),
        top_p=_shortest(message.top_p),
        top_k=message.top_k,
        min_tokens=message.min_tokens,
        max_tokens=message.max_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
    )


def encode_chunk(chunk: SampleTokens) -> fleet_pb2.SampleChunk:
    return fleet_pb2.SampleChunk(
        sample_index=chunk.sample_index,
        token_ids=pack_ids(chunk.token_ids),
        logprobs=pack_logprobs(chunk.behaviour_logprobs),
        version_runs=[
            fleet_pb2.VersionRun(version=version, num_tokens=num_tokens)
            for version, num_tokens in chunk.versions.runs
        ],
        finish_reason=_FINISH_REASONS[chunk.finish_reason]
        if chunk.finish_reason
        else fleet_pb2.FINISH_REASON_UNSPECIFIED,
        error=encode_failure(chunk.failure) if chunk.failure is not None else None,
        kept=encode_kept(chunk.kept) if chunk.kept is not None else None,
        routed_experts=encode_experts(chunk.routed_experts) if chunk.routed_experts is not None else None,
    )


def encode_failure(failure: SampleFailure) -> fleet_pb2.SampleError:
    return fleet_pb2.SampleError(kind=_FAILURES[failure.kind], message=failure.message)


def decode_chunk(message: fleet_pb2.SampleChunk, *, has_extras: bool = True) -> SampleTokens:
    """`has_extras`: kept sets or experts were asked for; else nobody looks for them."""
    token_ids = unpack_ids(message.token_ids)
    logprobs = unpack_logprobs(message.logprobs)
    versions = VersionRuns(tuple([(run.version, run.num_tokens) for run in message.version_runs[:]]))
    if not len(token_ids) == len(logprobs) == versions.num_tokens:
        raise ValueError(
            f"sample {message.sample_index}: {len(token_ids)} tokens, {len(logprobs)} log-probs, version runs of "
            f"{versions.num_tokens} tokens"
        )
    reason = message.finish_reason
    if reason not in _FINISH_REASON_NAMES:
        raise ValueError(f"sample {message.sample_index}: unknown finish reason {reason}")
    return SampleTokens(
        sample_index=message.sample_index,
        token_ids=token_ids,
        behaviour_logprobs=logprobs,
        versions=versions,
        finish_reason=_FINISH_REASON_NAMES[reason],
        failure=_failure_of(message) if message.HasField("error") else None,
        kept=decode_kept(message.kept, len(token_ids)) if has_extras and message.HasField("kept") else None,
        routed_experts=decode_experts(message.routed_experts)
        if has_extras and message.HasField("routed_experts")
        else None,
    )


def _failure_of(message: fleet_pb2.SampleChunk) -> SampleFailure:
    if message.error.kind not in _FAILURE_NAMES:
        raise ValueError(f"sample {message.sample_index}: unknown kind of error {message.error.kind}")
    return SampleFailure(kind=_FAILURE_NAMES[message.error.kind], message=message.error.message)


def joined(chunks: Sequence[SampleTokens]) -> SampleTokens:
    """The chunks of one sample, in their order, as one; `ValueError` where a version is older than one before it."""
    if len(chunks) == 1:
        return chunks[0]
    return SampleTokens(
        sample_index=chunks[0].sample_index,
        token_ids=np.concatenate([chunk.token_ids for chunk in chunks]),
        behaviour_logprobs=np.concatenate([chunk.behaviour_logprobs for chunk in chunks]),
        versions=VersionRuns.joined([chunk.versions for chunk in chunks]),
        finish_reason=chunks[-1].finish_reason,
        kept=joined_kept([chunk.kept for chunk in chunks if len(chunk.token_ids)]),
        routed_experts=chunks[-1].routed_experts,
    )


def response_of(chunks: Sequence[SampleTokens]) -> Response:
    """The chunks of one finished sample, in their order, as one response."""
    if not chunks or chunks[-1].finish_reason is None:
        raise ValueError("the last chunk of a response says why it ended")
    whole = joined(chunks)
    if not len(whole.token_ids):
        raise ValueError(f"a response ended ({whole.finish_reason}) without a token")
    return Response(
        token_ids=whole.token_ids,
        behaviour_logprobs=whole.behaviour_logprobs,
        versions=whole.versions,
        finish_reason=chunks[-1].finish_reason,
        kept=whole.kept,
        routed_experts=whole.routed_experts,
    )


def encode_manifest(manifest: Manifest) -> fleet_pb2.Manifest:
    return fleet_pb2.Manifest(
        tensors=[
            fleet_pb2.TensorSpec(name=spec.name, shape=spec.shape, dtype=spec.dtype)
            for spec in manifest.tensors
        ]
    )


def decode_manifest(message: fleet_pb2.Manifest) -> Manifest:
    return Manifest(
        tensors=tuple(
            TensorSpec(name=spec.name, shape=tuple(spec.shape), dtype=dtype_of(spec.dtype))
            for spec in message.tensors
        )
    )


def _odd_length(data: bytes, what: str) -> ValueError:
    return ValueError(f"{what} are {_ITEM_BYTES} bytes each, got {len(data)} bytes")


def dtype_of(name: str) -> Dtype:
    """A type that weights may have; `ValueError` for another one."""
    if name not in get_args(Dtype):
        raise ValueError(f"weights are float32 or bfloat16, got {name!r}")
    return cast(Dtype, name)


def _shortest(value: float) -> float:
    """The shortest decimal number that is this float32."""
    return float(str(np.float32(value)))
