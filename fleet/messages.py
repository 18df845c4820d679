"""What the messages ask for, checked: a request that no retry helps is refused before anything is done for it."""

import numpy as np

from asyppo_async.fleet.call_error import CallError
from asyppo_async.fleet.engine.protocol import Delta, EngineInfo
from asyppo_async.fleet.prober import ProbeWork
from asyppo_async.fleet.rollouts import Draw
from asyppo_async.fleet.staging import Meeting
from asyppo_async.fleet.update_state import RunIdentity, Session
from asyppo_async.rpc import codec
from asyppo_async.rpc.codec import SampleTokens
from asyppo_async.rpc.v1 import fleet_pb2
from asyppo_async.types import FinishReason, Int32Array, SamplingParams

_LOWEST_TEMPERATURE = 0.01
"""The engine itself would take a lower one for this one."""


def sample_tokens(sample_index: int, delta: Delta) -> SampleTokens:
    if delta.end == "aborted":
        raise AssertionError("an aborted sample has no last chunk")
    finish_reason: FinishReason | None = delta.end
    return SampleTokens(
        sample_index=sample_index,
        token_ids=delta.token_ids,
        behaviour_logprobs=delta.logprobs,
        versions=np.repeat(
            np.array([run.label.version for run in delta.runs], dtype=np.int32),
            [run.num_tokens for run in delta.runs],
        ),
        finish_reason=finish_reason,
    )


def decode_draw(request: fleet_pb2.GenerateRequest, info: EngineInfo) -> Draw:
    if request.num_samples < 1:
        raise CallError("INVALID_ARGUMENT", f"num_samples is at least 1, got {request.num_samples}")
    prompt = _decode_prompt(request.prompt_token_ids, info)
    sampling = codec.decode_sampling(request.sampling)
    check_sampling(sampling, info)
    return Draw(prompt_token_ids=prompt, num_samples=request.num_samples, sampling=sampling)


def _decode_prompt(data: bytes, info: EngineInfo) -> Int32Array:
    token_ids = codec.unpack_ids(data)
    if not len(token_ids):
        raise CallError("INVALID_ARGUMENT", "a prompt has at least one token")
    if len(token_ids) >= info.max_model_len:
        raise CallError(
            "INVALID_ARGUMENT",
            f"a prompt of {len(token_ids)} tokens leaves no room for a response: prompt and response hold at most "
            f"{info.max_model_len} tokens",
        )
    if int(token_ids.max()) >= info.vocab_size:
        raise CallError(
            "INVALID_ARGUMENT",
            f"token id {int(token_ids.max())} is not in the vocabulary of {info.vocab_size}",
        )
    return token_ids


def check_sampling(sampling: SamplingParams, info: EngineInfo) -> None:
    """Raise INVALID_ARGUMENT for parameters that the engine would change or refuse."""
    temperature = sampling.temperature
    wrong = ""
    if not (temperature == 0 or _LOWEST_TEMPERATURE <= temperature < float("inf")):
        wrong = f"temperature is 0 or at least {_LOWEST_TEMPERATURE}, got {temperature}"
    elif not 0 < sampling.top_p <= 1:
        wrong = f"top_p lies in (0, 1], got {sampling.top_p}; 1 is off"
    elif sampling.max_tokens < 1:
        wrong = f"max_tokens is at least 1, got {sampling.max_tokens}"
    elif sampling.min_tokens > sampling.max_tokens:
        wrong = f"min_tokens = {sampling.min_tokens} exceeds max_tokens = {sampling.max_tokens}"
    elif any(token >= info.vocab_size for token in sampling.stop_token_ids):
        wrong = f"stop ids {sampling.stop_token_ids} are not all in the vocabulary of {info.vocab_size}"
    if wrong:
        raise CallError("INVALID_ARGUMENT", wrong)


def decode_session(request: fleet_pb2.OpenSessionRequest) -> tuple[Session, Meeting]:
    if request.backend != "gloo":
        raise CallError(
            "INVALID_ARGUMENT",
            f"this server receives weights over gloo only, got backend {request.backend!r}",
        )
    if not 0 < request.rank < request.world_size:
        raise CallError(
            "INVALID_ARGUMENT", f"a receiver's rank lies in 1 .. world_size - 1, got {request.rank}"
        )
    check_positive("lease_s", request.lease_s)
    check_positive("deadline_s", request.deadline_s)
    identity = RunIdentity(run_id=request.run_id, incarnation=request.incarnation)
    session = Session(identity=identity, epoch=request.epoch, lease_s=request.lease_s)
    meeting = Meeting(
        backend="gloo",
        store_host=request.store_host,
        store_port=request.store_port,
        rank=request.rank,
        world_size=request.world_size,
        epoch=request.epoch,
        manifest=codec.decode_manifest(request.manifest),
        bucket_bytes=request.bucket_bytes,
        deadline_s=request.deadline_s,
    )
    return session, meeting


def decode_probe(request: fleet_pb2.ProbeRequest, info: EngineInfo) -> ProbeWork:
    check_positive("deadline_s", request.deadline_s)
    fixed = tuple(_decode_prompt(data, info) for data in request.fixed_token_ids)
    if any(len(token_ids) < 2 for token_ids in fixed):
        raise CallError("INVALID_ARGUMENT", "a fixed sequence has at least two tokens")
    sampling = codec.decode_sampling(request.sampling)
    if request.prompt_token_ids:
        check_sampling(sampling, info)
    return ProbeWork(
        fixed=fixed,
        prompts=tuple(_decode_prompt(data, info) for data in request.prompt_token_ids),
        sampling=sampling,
        deadline_s=request.deadline_s,
    )


def check_positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise CallError("INVALID_ARGUMENT", f"{name} is a positive number of seconds, got {value}")
