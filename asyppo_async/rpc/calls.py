"""What the calls of a fleet client take and give, and putting streamed chunks together again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from asyppo_async.errors import FleetUnavailable, RequestRejected
from asyppo_async.rpc import codec
from asyppo_async.rpc.codec import SampleFailure, SampleTokens
from asyppo_async.rpc.v1 import fleet_pb2
from asyppo_async.types import Float32Array, Int32Array, Response, SamplingParams

KvOnUpdate = Literal["keep", "recompute"]
Way = Literal["staged", "direct", "folder"]
"""How the bytes of a publication get from the trainer into the engine; the contract says what each means."""


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
    begun: tuple[SampleTokens, ...] = ()
    """What is there of some samples already, from a server that was lost: they go on from it."""
    return_kept_tokens: bool = False
    """Every response says what each of its tokens was sampled from; needs top_k."""
    return_routed_experts: bool = False
    """Every response of a mixture of experts says which of them were used."""

    @property
    def has_extras(self) -> bool:
        """Whether more than ids and log-probs was asked for."""
        return self.return_kept_tokens or self.return_routed_experts


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
    way: Way = "staged"
    folder: str = ""
    """Of the way `folder`, as the server sees it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    checksums: tuple[int, ...]
    num_bytes: int
    receive_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedChecksums:
    """What a server's engine was given by the publication that it serves."""

    run_id: str
    incarnation: int
    version: int
    tensors: dict[str, int]
    """XXH3-64 by name."""


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
    """The chunks of one request, as they come, behind what its samples had begun with."""

    def __init__(
        self, num_samples: int, sampling: SamplingParams, begun: Sequence[SampleTokens] = ()
    ) -> None:
        self._chunks: list[list[SampleTokens]] = [[] for _ in range(num_samples)]
        self._sampling = sampling
        self.num_samples = num_samples
        self.num_tokens = 0
        self.failures: dict[int, SampleFailure] = {}
        """Samples that ended without being finished, by index."""
        self._ended: set[int] = set()
        """Finished, or failed."""
        for sample in begun:
            self.add(sample)

    def add(self, chunk: SampleTokens, indices: Sequence[int] | None = None) -> None:
        """Raise `ValueError` for a chunk that this request cannot have.

        `indices`: which sample here each sample of its sender is; None: the same one.
        """
        index, known = chunk.sample_index, range(self.num_samples) if indices is None else indices
        if not 0 <= index < len(known):
            raise ValueError(f"sample {index} of a request for {len(known)}")
        if known[index] != index:
            index = known[index]
            chunk = replace(chunk, sample_index=index)
        if index in self._ended:
            raise ValueError(f"sample {index} goes on after it was finished")
        if chunk.failure is not None:
            self.failures[index] = chunk.failure
            self._ended.add(index)
        elif chunk.finish_reason is not None:
            self._ended.add(index)
        self._chunks[index].append(chunk)
        self.num_tokens += len(chunk.token_ids)

    def unfinished(self) -> list[int]:
        """Samples that still go on, or have to."""
        return [index for index in range(self.num_samples) if index not in self._ended]

    def arrived(self) -> tuple[tuple[SampleTokens, ...], ...]:
        """The chunks until now of every sample of which there are some, finished ones too."""
        return tuple(tuple(chunks) for chunks in self._chunks if chunks)

    def begun(self) -> tuple[SampleTokens, ...]:
        """What is there of the unfinished samples, each joined; without those of which nothing is there."""
        return tuple(codec.joined(self._chunks[index]) for index in self.unfinished() if self._chunks[index])

    def rest_of(self, call: GenerateCall) -> GenerateCall:
        """What is still to be asked for: the unfinished samples, numbered anew, going on from what is there."""
        if not self.num_tokens and not self._ended:
            return call
        number_of = {index: number for number, index in enumerate(self.unfinished())}
        begun = tuple(replace(sample, sample_index=number_of[sample.sample_index]) for sample in self.begun())
        return replace(call, num_samples=len(number_of), begun=begun)

    def responses(self) -> tuple[Response | None, ...]:
        """All samples, None for an unfinished one; raise `ValueError` for one that is not what was asked for."""
        return tuple(
            self._response(index, chunks) if _is_finished(chunks) else None
            for index, chunks in enumerate(self._chunks)
        )

    def _response(self, index: int, chunks: list[SampleTokens]) -> Response:
        response = codec.response_of(chunks)
        last = int(response.token_ids[-1])
        is_stop = last in self._sampling.stop_token_ids
        if response.finish_reason == "stop" and not is_stop:
            raise ValueError(f"sample {index} stopped at {last}, which is no stop id")
        if response.finish_reason == "length" and is_stop:
            raise ValueError(f"sample {index} was cut at {last}, which is a stop id")
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


def served_checksums_of(message: fleet_pb2.GetChecksumsResponse) -> ServedChecksums:
    return ServedChecksums(
        run_id=message.run_id,
        incarnation=message.incarnation,
        version=message.version,
        tensors={tensor.name: tensor.checksum for tensor in message.tensors},
    )


def check_first(message: fleet_pb2.GenerateChunk, call: GenerateCall) -> int:
    """How many tokens there is room for, if that is fewer than were asked for; else 0.

    Raises:
        ValueError: the server read another prompt than was sent.
    """
    if message.HasField("prompt_checksum") and message.prompt_checksum != codec.checksum_of(
        call.prompt_token_ids
    ):
        raise ValueError(f"the prompt of {len(call.prompt_token_ids)} tokens arrived as another one")
    return message.clipped_max_tokens


def all_of(
    samples: Sequence[Response | None],
    failures: Mapping[int, SampleFailure],
    who: str,
    call: GenerateCall,
    deadline_s: float,
) -> tuple[Response, ...]:
    """Every sample of a request, or the error that says what became of one that is missing."""
    what = f"{who}: Generate {call.request_id}"
    for index, failure in failures.items():
        kind = RequestRejected if failure.kind == "too_long" else FleetUnavailable
        raise kind(f"{what}: sample {index}: {failure.message}")
    missing = [index for index, sample in enumerate(samples) if sample is None]
    if missing:
        raise FleetUnavailable(
            f"{what}: samples {missing} were not finished by the deadline {deadline_s:g} s"
        )
    return tuple(sample for sample in samples if sample is not None)
