"""Between the messages of the contract and the values of `asyppo_async.types`; what comes in is checked here.

Arrays are packed little-endian bytes: int32 ids, float32 log-probs. Decoders raise `ValueError` with what is wrong; the
callers know which peer and which request it belongs to.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np

from asyppo_async.rpc.v1 import fleet_pb2
from asyppo_async.types import FinishReason, Float32Array, Int32Array, Response, SamplingParams
from asyppo_async.weights.manifest import Dtype, Manifest, TensorSpec

ServerState = Literal["starting", "weights_unknown", "serving", "updating", "draining", "failed"]

_STATES: dict[ServerState, fleet_pb2.ServerState] = {
    "starting": fleet_pb2.SERVER_STATE_STARTING,
    "weights_unknown": fleet_pb2.SERVER_STATE_WEIGHTS_UNKNOWN,
    "serving": fleet_pb2.SERVER_STATE_SERVING,
    "updating": fleet_pb2.SERVER_STATE_UPDATING,
    "draining": fleet_pb2.SERVER_STATE_DRAINING,
    "failed": fleet_pb2.SERVER_STATE_FAILED,
}
_STATE_NAMES = {number: name for name, number in _STATES.items()}
_FINISH_REASONS: dict[FinishReason, fleet_pb2.FinishReason] = {
    "stop": fleet_pb2.FINISH_REASON_STOP,
    "length": fleet_pb2.FINISH_REASON_LENGTH,
}
_FINISH_REASON_NAMES = {number: name for name, number in _FINISH_REASONS.items()}
_ITEM_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What a server says of itself; the fields are documented in the contract."""

    server_id: str
    model_name: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    max_num_seqs: int
    num_workers: int
    dtype: Dtype
    state: ServerState
    run_id: str
    incarnation: int
    served_version: int
    num_running_samples: int
    num_queued_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTokens:
    """The next tokens of one sample: a decoded chunk."""

    sample_index: int
    token_ids: Int32Array
    """[n]"""
    behaviour_logprobs: Float32Array
    """[n]"""
    versions: Int32Array
    """[n]"""
    finish_reason: FinishReason | None
    """None: more follows."""


def pack_ids(token_ids: Sequence[int] | Int32Array) -> bytes:
    return np.ascontiguousarray(token_ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> Int32Array:
    """Token ids; none is negative."""
    token_ids = _unpack(data, "<i4", "token ids").astype(np.int32, copy=False)
    if token_ids.size and int(token_ids.min()) < 0:
        raise ValueError(f"token ids are not negative, got {int(token_ids.min())}")
    return token_ids


def pack_logprobs(logprobs: Sequence[float] | Float32Array) -> bytes:
    return np.ascontiguousarray(logprobs, dtype="<f4").tobytes()


def unpack_logprobs(data: bytes) -> Float32Array:
    """Log-probs as they came; see `is_poisoned` for those that are no numbers."""
    return _unpack(data, "<f4", "log-probs").astype(np.float32, copy=False)


def is_poisoned(logprobs: Float32Array) -> bool:
    """Whether a log-prob is NaN or +inf: the engine computed something else than a distribution.

    Such a trajectory is dropped and counted: no mask makes it harmless, since NaN times 0 is NaN.
    """
    return bool(np.isnan(logprobs).any() or np.isposinf(logprobs).any())


def encode_version_runs(versions: Int32Array) -> list[fleet_pb2.VersionRun]:
    """Run-length code of the version of each token."""
    if not versions.size:
        return []
    starts = np.flatnonzero(np.diff(versions, prepend=versions[0] - 1))
    lengths = np.diff(starts, append=versions.size)
    return [
        fleet_pb2.VersionRun(version=int(versions[start]), num_tokens=int(length))
        for start, length in zip(starts, lengths, strict=True)
    ]


def decode_version_runs(runs: Iterable[fleet_pb2.VersionRun], num_tokens: int) -> Int32Array:
    """The version of each of `num_tokens` tokens, non-decreasing."""
    pairs = [(run.version, run.num_tokens) for run in runs]
    counts = [count for _, count in pairs]
    if sum(counts) != num_tokens or 0 in counts:
        raise ValueError(f"version runs of {counts} tokens do not add up to {num_tokens} tokens")
    versions = np.repeat(np.array([version for version, _ in pairs], dtype=np.int32), counts)
    if versions.size and (int(versions[0]) < 0 or bool((np.diff(versions) < 0).any())):
        raise ValueError(f"versions of a sample never fall, got runs {pairs}")
    return versions


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
        version_runs=encode_version_runs(chunk.versions),
        finish_reason=_FINISH_REASONS[chunk.finish_reason]
        if chunk.finish_reason
        else fleet_pb2.FINISH_REASON_UNSPECIFIED,
    )


def decode_chunk(message: fleet_pb2.SampleChunk) -> SampleTokens:
    token_ids = unpack_ids(message.token_ids)
    logprobs = unpack_logprobs(message.logprobs)
    if len(token_ids) != len(logprobs):
        raise ValueError(f"sample {message.sample_index}: {len(token_ids)} tokens, {len(logprobs)} log-probs")
    finish_reason = _FINISH_REASON_NAMES.get(message.finish_reason)
    if finish_reason is None and message.finish_reason != fleet_pb2.FINISH_REASON_UNSPECIFIED:
        raise ValueError(f"sample {message.sample_index}: unknown finish reason {message.finish_reason}")
    return SampleTokens(
        sample_index=message.sample_index,
        token_ids=token_ids,
        behaviour_logprobs=logprobs,
        versions=decode_version_runs(message.version_runs, len(token_ids)),
        finish_reason=finish_reason,
    )


def response_of(chunks: Sequence[SampleTokens]) -> Response:
    """The chunks of one finished sample, in their order, as one response."""
    finish_reason = chunks[-1].finish_reason if chunks else None
    if finish_reason is None:
        raise ValueError("the last chunk of a response says why it ended")
    versions = np.concatenate([chunk.versions for chunk in chunks])
    if not versions.size:
        raise ValueError(f"a response ended ({finish_reason}) without a token")
    if bool((np.diff(versions) < 0).any()):
        raise ValueError(f"versions of a sample never fall, got {np.unique(versions).tolist()} out of order")
    return Response(
        token_ids=np.concatenate([chunk.token_ids for chunk in chunks]),
        behaviour_logprobs=np.concatenate([chunk.behaviour_logprobs for chunk in chunks]),
        versions=versions,
        finish_reason=finish_reason,
    )


def encode_info(info: ServerInfo) -> fleet_pb2.ServerInfo:
    return fleet_pb2.ServerInfo(
        server_id=info.server_id,
        model_name=info.model_name,
        model_fingerprint=info.model_fingerprint,
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        num_workers=info.num_workers,
        dtype=info.dtype,
        state=_STATES[info.state],
        run_id=info.run_id,
        incarnation=info.incarnation,
        served_version=info.served_version,
        num_running_samples=info.num_running_samples,
        num_queued_samples=info.num_queued_samples,
    )


def decode_info(message: fleet_pb2.ServerInfo) -> ServerInfo:
    if message.state not in _STATE_NAMES:
        raise ValueError(f"unknown server state {message.state}")
    return ServerInfo(
        server_id=message.server_id,
        model_name=message.model_name,
        model_fingerprint=message.model_fingerprint,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        vocab_size=message.vocab_size,
        eos_token_ids=tuple(message.eos_token_ids),
        max_model_len=message.max_model_len,
        max_num_seqs=message.max_num_seqs,
        num_workers=message.num_workers,
        dtype=_dtype_of(message.dtype),
        state=_STATE_NAMES[message.state],
        run_id=message.run_id,
        incarnation=message.incarnation,
        served_version=message.served_version,
        num_running_samples=message.num_running_samples,
        num_queued_samples=message.num_queued_samples,
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
            TensorSpec(name=spec.name, shape=tuple(spec.shape), dtype=_dtype_of(spec.dtype))
            for spec in message.tensors
        )
    )


def _unpack(data: bytes, dtype: str, what: str) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
    if len(data) % _ITEM_BYTES:
        raise ValueError(f"{what} are {_ITEM_BYTES} bytes each, got {len(data)} bytes")
    return np.frombuffer(data, dtype=dtype)


def _dtype_of(name: str) -> Dtype:
    if name not in get_args(Dtype):
        raise ValueError(f"weights are float32 or bfloat16, got {name!r}")
    return cast(Dtype, name)


def _shortest(value: float) -> float:
    """The shortest decimal number that is this float32."""
    return float(str(np.float32(value)))
