"""What the messages ask for, checked: a request that no retry helps is refused before anything is done for it."""

from typing import cast, get_args

from asyppo_async.fleet.call_error import CallError
from asyppo_async.fleet.draw import Draw, Outgoing, SampleDelta
from asyppo_async.fleet.engine.protocol import Delta, EngineInfo, KvOnUpdate
from asyppo_async.fleet.prober import ProbeWork
from asyppo_async.fleet.staging import Meeting
from asyppo_async.fleet.update_state import RunIdentity, Session
from asyppo_async.rpc import codec
from asyppo_async.rpc.calls import Way
from asyppo_async.rpc.codec import SampleTokens
from asyppo_async.rpc.v1 import fleet_pb2
from asyppo_async.types import FinishReason, Int32Array, SamplingParams, VersionRuns

_LOWEST_TEMPERATURE = 0.01
"""The engine itself would take a lower one for this one."""


def outgoing_chunk(item: Outgoing) -> fleet_pb2.SampleChunk:
    """The message of a delta, or of a sample that failed."""
    if isinstance(item, SampleDelta):
        return codec.encode_chunk(sample_tokens(item.sample_index, item.delta))
    return fleet_pb2.SampleChunk(sample_index=item.sample_index, error=codec.encode_failure(item.failure))


def sample_tokens(sample_index: int, delta: Delta) -> SampleTokens:
    if delta.end == "aborted":
        raise AssertionError("an aborted sample has no last chunk")
    finish_reason: FinishReason | None = delta.end
    return SampleTokens(
        sample_index=sample_index,
        token_ids=delta.token_ids,
        behaviour_logprobs=delta.logprobs,
        versions=VersionRuns(tuple((run.label.version, run.num_tokens) for run in delta.runs)),
        finish_reason=finish_reason,
        kept=delta.kept,
        routed_experts=delta.routed_experts,
    )


def decode_draw(request: fleet_pb2.GenerateRequest, info: EngineInfo, max_samples: int) -> Draw:
    if not 1 <= request.num_samples <= max_samples:
        raise CallError(
            "INVALID_ARGUMENT",
            f"num_samples is 1 to {max_samples} (--max-samples-per-call), got {request.num_samples}",
        )
    prompt = _decode_ids(request.prompt_token_ids, info)
    sampling = codec.decode_sampling(request.sampling)
    check_sampling(sampling, info)
    _check_extras(request, sampling, info)
    return Draw(
        prompt_token_ids=prompt,
        num_samples=request.num_samples,
        sampling=sampling,
        begun=_decode_begun(request, sampling, info),
        max_model_len=info.max_model_len,
        request_id=request.request_id,
        prompt_id=request.prompt_id,
        return_kept_tokens=request.return_kept_tokens,
        return_routed_experts=request.return_routed_experts,
    )


def _check_extras(request: fleet_pb2.GenerateRequest, sampling: SamplingParams, info: EngineInfo) -> None:
    if request.return_kept_tokens and not 0 < sampling.top_k <= info.max_kept_tokens:
        raise CallError(
            "INVALID_ARGUMENT",
            f"return_kept_tokens needs top_k between 1 and {info.max_kept_tokens} (--max-kept-tokens), got "
            f"{sampling.top_k}",
        )
    if request.return_routed_experts and not info.returns_routed_experts:
        raise CallError("INVALID_ARGUMENT", "this server's engine does not say which experts it used")


def _decode_begun(
    request: fleet_pb2.GenerateRequest, sampling: SamplingParams, info: EngineInfo
) -> dict[int, Int32Array]:
    begun: dict[int, Int32Array] = {}
    for sample in request.begun:
        index, token_ids = sample.sample_index, codec.unpack_ids(sample.token_ids)
        wrong = ""
        if index >= request.num_samples or index in begun:
            wrong = f"there is no such sample among {request.num_samples}, or it comes twice"
        elif not 0 < len(token_ids) < sampling.max_tokens:
            wrong = f"it has {len(token_ids)} tokens and goes up to max_tokens = {sampling.max_tokens}"
        elif unknown := _unknown_id(token_ids, info):
            wrong = unknown
        elif int(token_ids[-1]) in sampling.stop_token_ids:
            wrong = f"it ends with the stop id {int(token_ids[-1])}, so it is finished"
        if wrong:
            raise CallError("INVALID_ARGUMENT", f"begun sample {index}: {wrong}")
        begun[index] = token_ids
    return begun


def _decode_prompt(data: bytes, info: EngineInfo) -> Int32Array:
    """One that leaves room for a token."""
    token_ids = _decode_ids(data, info)
    if len(token_ids) >= info.max_model_len:
        raise CallError(
            "INVALID_ARGUMENT",
            f"a prompt of {len(token_ids)} tokens leaves no room for a response: prompt and response hold at most "
            f"{info.max_model_len} tokens",
        )
    return token_ids


def _decode_ids(data: bytes, info: EngineInfo) -> Int32Array:
    token_ids = codec.unpack_ids(data)
    if not len(token_ids):
        raise CallError("INVALID_ARGUMENT", "a prompt has at least one token")
    if unknown := _unknown_id(token_ids, info):
        raise CallError("INVALID_ARGUMENT", unknown)
    return token_ids


def _unknown_id(token_ids: Int32Array, info: EngineInfo) -> str:
    """Which id the engine does not know; empty where it knows them all."""
    for token_id in (int(token_ids.min()), int(token_ids.max())):
        if not 0 <= token_id < info.vocab_size:
            return f"token id {token_id} is not in the vocabulary of {info.vocab_size}"
    return ""


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


def decode_session(request: fleet_pb2.OpenSessionRequest, info: EngineInfo) -> tuple[Session, Meeting]:
    """In the direct way each worker of the engine takes a rank of its own."""
    way = request.way or "staged"
    if way not in get_args(Way):
        raise CallError("INVALID_ARGUMENT", f"a way is one of {', '.join(get_args(Way))}, got {way!r}")
    if way == "direct" and info.max_lora_rank:
        raise CallError(
            "INVALID_ARGUMENT",
            "this server takes adapters (--enable-lora), which arrive in host memory: use the way staged or folder",
        )
    if way == "folder":
        if not request.folder:
            raise CallError("INVALID_ARGUMENT", "the way folder needs a folder")
    else:
        _check_group(request, way, info.num_workers if way == "direct" else 1)
    check_positive("lease_s", request.lease_s)
    check_positive("deadline_s", request.deadline_s)
    identity = RunIdentity(run_id=request.run_id, incarnation=request.incarnation)
    session = Session(
        identity=identity,
        epoch=request.epoch,
        lease_s=request.lease_s,
        world_size=request.world_size,
    )
    meeting = Meeting(
        way=cast(Way, way),
        backend="nccl" if request.backend == "nccl" else "gloo",
        store_host=request.store_host,
        store_port=request.store_port,
        rank=request.rank,
        world_size=request.world_size,
        epoch=request.epoch,
        manifest=codec.decode_manifest(request.manifest),
        bucket_bytes=request.bucket_bytes,
        deadline_s=request.deadline_s,
        folder=request.folder,
    )
    return session, meeting


def _check_group(request: fleet_pb2.OpenSessionRequest, way: str, num_ranks: int) -> None:
    if request.backend != "gloo" and not (request.backend == "nccl" and way == "direct"):
        raise CallError(
            "INVALID_ARGUMENT",
            f"host memory receives weights over gloo only, got backend {request.backend!r}; nccl needs the way direct",
        )
    if not 0 < request.rank <= request.world_size - num_ranks:
        raise CallError(
            "INVALID_ARGUMENT",
            f"{num_ranks} receivers from rank {request.rank} on do not fit a world of {request.world_size}",
        )


def decode_kv(text: str) -> KvOnUpdate:
    if text not in get_args(KvOnUpdate):
        raise CallError("INVALID_ARGUMENT", f"kv_on_update is keep or recompute, got {text!r}")
    return cast(KvOnUpdate, text)


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
