"""What the calls of a fleet client take and give, and putting streamed chunks together again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from asyppo_async.rpc import codec
from asyppo_async.rpc.codec import SampleTokens
from asyppo_async.rpc.v1 import fleet_pb2
from asyppo_async.types import Float32Array, Int32Array, Response, SamplingParams

KvOnUpdate = Literal["keep", "recompute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """What is asked of a server for one draw of a prompt."""

    run_id: str
    incarnation: int
    request_id: str
    prompt_id: str
    prompt_token_ids: Sequence[int] | Int32Array
    num_samples: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlace:
    """A server's place in the process group of one epoch."""

    run_id: str
    incarnation: int
    epoch: int
    rank: int
    world_size: int
    backend: Literal["gloo", "nccl"]
    store_host: str
    store_port: int
    bucket_bytes: int
    lease_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    checksums: tuple[int, ...]
    num_bytes: int
    receive_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitReport:
    pause_s: float
    load_s: float
    resume_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    fixed_logprobs: tuple[Float32Array, ...]
    """One array for each fixed sequence: [length - 1]."""
    sampled: tuple[Response, ...]
    probe_s: float


class ResponseParts:
    """The chunks of one request, as they come."""

    def __init__(self, num_samples: int, sampling: SamplingParams) -> None:
        self._chunks: list[list[SampleTokens]] = [[] for _ in range(num_samples)]
        self._sampling = sampling
        self.num_tokens = 0

    def add(self, chunk: SampleTokens) -> None:
        """Raise `ValueError` for a chunk that this request cannot have."""
        if not 0 <= chunk.sample_index < len(self._chunks):
            raise ValueError(f"sample {chunk.sample_index} of a request for {len(self._chunks)}")
        chunks = self._chunks[chunk.sample_index]
        if _is_finished(chunks):
            raise ValueError(f"sample {chunk.sample_index} goes on after it was finished")
        chunks.append(chunk)
        self.num_tokens += len(chunk.token_ids)

    def unfinished(self) -> list[int]:
        return [index for index, chunks in enumerate(self._chunks) if not _is_finished(chunks)]

    def responses(self) -> tuple[Response, ...]:
        """All samples, whole; raise `ValueError` for one that is not what was asked for."""
        return tuple(self._response(index, chunks) for index, chunks in enumerate(self._chunks))

    def _response(self, index: int, chunks: list[SampleTokens]) -> Response:
        response = codec.response_of(chunks)
        last = int(response.token_ids[-1])
        if response.finish_reason == "stop" and last not in self._sampling.stop_token_ids:
            raise ValueError(f"sample {index} stopped at {last}, which is no stop id")
        if len(response.token_ids) > self._sampling.max_tokens:
            raise ValueError(
                f"sample {index} has {len(response.token_ids)} tokens, max_tokens {self._sampling.max_tokens}"
            )
        return response


def _is_finished(chunks: list[SampleTokens]) -> bool:
    return bool(chunks) and chunks[-1].finish_reason is not None


def probe_report_of(
    message: fleet_pb2.ProbeResponse, fixed: Sequence[Int32Array], num_prompts: int
) -> ProbeReport:
    """Raise `ValueError` if the server did not answer for every sequence and every prompt."""
    fixed_logprobs = tuple(codec.unpack_logprobs(data) for data in message.fixed_logprobs)
    expected = [len(sequence) - 1 for sequence in fixed]
    if [len(logprobs) for logprobs in fixed_logprobs] != expected:
        raise ValueError(
            f"fixed sequences have {expected} scored tokens, got {[len(scored) for scored in fixed_logprobs]}"
        )
    samples = [codec.decode_chunk(sample) for sample in message.sampled]
    if sorted(sample.sample_index for sample in samples) != list(range(num_prompts)):
        raise ValueError(f"{num_prompts} prompts have {num_prompts} continuations, got {len(samples)}")
    samples.sort(key=lambda sample: sample.sample_index)
    return ProbeReport(
        fixed_logprobs=fixed_logprobs,
        sampled=tuple(codec.response_of([sample]) for sample in samples),
        probe_s=message.probe_s,
    )
