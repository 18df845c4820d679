from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVER_STATE_UNSPECIFIED: _ClassVar[ServerState]
    SERVER_STATE_STARTING: _ClassVar[ServerState]
    SERVER_STATE_WEIGHTS_UNKNOWN: _ClassVar[ServerState]
    SERVER_STATE_SERVING: _ClassVar[ServerState]
    SERVER_STATE_UPDATING: _ClassVar[ServerState]
    SERVER_STATE_DRAINING: _ClassVar[ServerState]
    SERVER_STATE_FAILED: _ClassVar[ServerState]

class SampleErrorKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SAMPLE_ERROR_KIND_UNSPECIFIED: _ClassVar[SampleErrorKind]
    SAMPLE_ERROR_KIND_TOO_LONG: _ClassVar[SampleErrorKind]
    SAMPLE_ERROR_KIND_CANCELLED: _ClassVar[SampleErrorKind]
    SAMPLE_ERROR_KIND_ENGINE_FAULT: _ClassVar[SampleErrorKind]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
SERVER_STATE_UNSPECIFIED: ServerState
SERVER_STATE_STARTING: ServerState
SERVER_STATE_WEIGHTS_UNKNOWN: ServerState
SERVER_STATE_SERVING: ServerState
SERVER_STATE_UPDATING: ServerState
SERVER_STATE_DRAINING: ServerState
SERVER_STATE_FAILED: ServerState
SAMPLE_ERROR_KIND_UNSPECIFIED: SampleErrorKind
SAMPLE_ERROR_KIND_TOO_LONG: SampleErrorKind
SAMPLE_ERROR_KIND_CANCELLED: SampleErrorKind
SAMPLE_ERROR_KIND_ENGINE_FAULT: SampleErrorKind
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetChecksumsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetChecksumsResponse(_message.Message):
    __slots__ = ("run_id", "incarnation", "version", "tensors")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    incarnation: int
    version: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorChecksum]
    def __init__(self, run_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., version: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorChecksum, _Mapping]]] = ...) -> None: ...

class TensorChecksum(_message.Message):
    __slots__ = ("name", "checksum")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    name: str
    checksum: int
    def __init__(self, name: _Optional[str] = ..., checksum: _Optional[int] = ...) -> None: ...

class WatchInfoRequest(_message.Message):
    __slots__ = ("interval_s",)
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    interval_s: float
    def __init__(self, interval_s: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace_s",)
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    grace_s: float
    def __init__(self, grace_s: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_samples",)
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    num_samples: int
    def __init__(self, num_samples: _Optional[int] = ...) -> None: ...

class ServerInfo(_message.Message):
    __slots__ = ("server_id", "model_name", "model_fingerprint", "tokenizer_fingerprint", "vocab_size", "eos_token_ids", "max_model_len", "max_num_seqs", "num_workers", "dtype", "state", "run_id", "incarnation", "served_version", "num_running_samples", "num_queued_samples", "sent_tokens", "sent_tokens_per_s", "session_epoch", "session_world_size", "uptime_s", "kv_cache_usage", "float32_head")
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SERVED_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SENT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SESSION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    FLOAT32_HEAD_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    model_name: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_model_len: int
    max_num_seqs: int
    num_workers: int
    dtype: str
    state: ServerState
    run_id: str
    incarnation: int
    served_version: int
    num_running_samples: int
    num_queued_samples: int
    sent_tokens: int
    sent_tokens_per_s: float
    session_epoch: int
    session_world_size: int
    uptime_s: float
    kv_cache_usage: float
    float32_head: bool
    def __init__(self, server_id: _Optional[str] = ..., model_name: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., num_workers: _Optional[int] = ..., dtype: _Optional[str] = ..., state: _Optional[_Union[ServerState, str]] = ..., run_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., served_version: _Optional[int] = ..., num_running_samples: _Optional[int] = ..., num_queued_samples: _Optional[int] = ..., sent_tokens: _Optional[int] = ..., sent_tokens_per_s: _Optional[float] = ..., session_epoch: _Optional[int] = ..., session_world_size: _Optional[int] = ..., uptime_s: _Optional[float] = ..., kv_cache_usage: _Optional[float] = ..., float32_head: _Optional[bool] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id", "sample_indices")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDICES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    sample_indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., sample_indices: _Optional[_Iterable[int]] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("num_samples",)
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    num_samples: int
    def __init__(self, num_samples: _Optional[int] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_tokens", "max_tokens", "stop_token_ids")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_tokens: int
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("run_id", "incarnation", "request_id", "prompt_id", "prompt_token_ids", "num_samples", "sampling", "begun", "return_kept_tokens", "return_routed_experts")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    RETURN_KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETURN_ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    incarnation: int
    request_id: str
    prompt_id: str
    prompt_token_ids: bytes
    num_samples: int
    sampling: SamplingParams
    begun: _containers.RepeatedCompositeFieldContainer[BegunSample]
    return_kept_tokens: bool
    return_routed_experts: bool
    def __init__(self, run_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_id: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., num_samples: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., begun: _Optional[_Iterable[_Union[BegunSample, _Mapping]]] = ..., return_kept_tokens: _Optional[bool] = ..., return_routed_experts: _Optional[bool] = ...) -> None: ...

class BegunSample(_message.Message):
    __slots__ = ("sample_index", "token_ids")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    token_ids: bytes
    def __init__(self, sample_index: _Optional[int] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class GenerateChunk(_message.Message):
    __slots__ = ("samples", "clipped_max_tokens", "prompt_checksum")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CLIPPED_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[SampleChunk]
    clipped_max_tokens: int
    prompt_checksum: int
    def __init__(self, samples: _Optional[_Iterable[_Union[SampleChunk, _Mapping]]] = ..., clipped_max_tokens: _Optional[int] = ..., prompt_checksum: _Optional[int] = ...) -> None: ...

class SampleChunk(_message.Message):
    __slots__ = ("sample_index", "token_ids", "logprobs", "version_runs", "finish_reason", "error", "kept", "routed_experts")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSION_RUNS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    token_ids: bytes
    logprobs: bytes
    version_runs: _containers.RepeatedCompositeFieldContainer[VersionRun]
    finish_reason: FinishReason
    error: SampleError
    kept: KeptTokens
    routed_experts: RoutedExperts
    def __init__(self, sample_index: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., version_runs: _Optional[_Iterable[_Union[VersionRun, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., error: _Optional[_Union[SampleError, _Mapping]] = ..., kept: _Optional[_Union[KeptTokens, _Mapping]] = ..., routed_experts: _Optional[_Union[RoutedExperts, _Mapping]] = ...) -> None: ...

class SampleError(_message.Message):
    __slots__ = ("kind", "message")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    kind: SampleErrorKind
    message: str
    def __init__(self, kind: _Optional[_Union[SampleErrorKind, str]] = ..., message: _Optional[str] = ...) -> None: ...

class KeptTokens(_message.Message):
    __slots__ = ("token_ids", "counts")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    counts: bytes
    def __init__(self, token_ids: _Optional[bytes] = ..., counts: _Optional[bytes] = ...) -> None: ...

class RoutedExperts(_message.Message):
    __slots__ = ("num_layers", "experts_per_token", "item_bytes", "expert_ids")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ITEM_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPERT_IDS_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    experts_per_token: int
    item_bytes: int
    expert_ids: bytes
    def __init__(self, num_layers: _Optional[int] = ..., experts_per_token: _Optional[int] = ..., item_bytes: _Optional[int] = ..., expert_ids: _Optional[bytes] = ...) -> None: ...

class VersionRun(_message.Message):
    __slots__ = ("version", "num_tokens")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    version: int
    num_tokens: int
    def __init__(self, version: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("tensors",)
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    def __init__(self, tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "shape", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("run_id", "incarnation", "epoch", "rank", "world_size", "backend", "store_host", "store_port", "manifest", "bucket_bytes", "lease_s", "deadline_s", "way", "folder")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    STORE_HOST_FIELD_NUMBER: _ClassVar[int]
    STORE_PORT_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    WAY_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    incarnation: int
    epoch: int
    rank: int
    world_size: int
    backend: str
    store_host: str
    store_port: int
    manifest: Manifest
    bucket_bytes: int
    lease_s: float
    deadline_s: float
    way: str
    folder: str
    def __init__(self, run_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., epoch: _Optional[int] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., backend: _Optional[str] = ..., store_host: _Optional[str] = ..., store_port: _Optional[int] = ..., manifest: _Optional[_Union[Manifest, _Mapping]] = ..., bucket_bytes: _Optional[int] = ..., lease_s: _Optional[float] = ..., deadline_s: _Optional[float] = ..., way: _Optional[str] = ..., folder: _Optional[str] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("held_version",)
    HELD_VERSION_FIELD_NUMBER: _ClassVar[int]
    held_version: int
    def __init__(self, held_version: _Optional[int] = ...) -> None: ...

class StageRequest(_message.Message):
    __slots__ = ("epoch", "version", "deadline_s", "base_version", "kv_on_update")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    KV_ON_UPDATE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    deadline_s: float
    base_version: int
    kv_on_update: str
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ..., deadline_s: _Optional[float] = ..., base_version: _Optional[int] = ..., kv_on_update: _Optional[str] = ...) -> None: ...

class StageResponse(_message.Message):
    __slots__ = ("checksums", "num_bytes", "receive_s")
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_S_FIELD_NUMBER: _ClassVar[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    num_bytes: int
    receive_s: float
    def __init__(self, checksums: _Optional[_Iterable[int]] = ..., num_bytes: _Optional[int] = ..., receive_s: _Optional[float] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("epoch", "version", "checksums", "kv_on_update")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    KV_ON_UPDATE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    checksums: _containers.RepeatedScalarFieldContainer[int]
    kv_on_update: str
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ..., checksums: _Optional[_Iterable[int]] = ..., kv_on_update: _Optional[str] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("pause_s", "load_s", "resume_s")
    PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    RESUME_S_FIELD_NUMBER: _ClassVar[int]
    pause_s: float
    load_s: float
    resume_s: float
    def __init__(self, pause_s: _Optional[float] = ..., load_s: _Optional[float] = ..., resume_s: _Optional[float] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("epoch", "version", "fixed_token_ids", "prompt_token_ids", "sampling", "deadline_s")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FIXED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    fixed_token_ids: _containers.RepeatedScalarFieldContainer[bytes]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[bytes]
    sampling: SamplingParams
    deadline_s: float
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ..., fixed_token_ids: _Optional[_Iterable[bytes]] = ..., prompt_token_ids: _Optional[_Iterable[bytes]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class ProbeResponse(_message.Message):
    __slots__ = ("fixed_logprobs", "sampled", "probe_s")
    FIXED_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    PROBE_S_FIELD_NUMBER: _ClassVar[int]
    fixed_logprobs: _containers.RepeatedScalarFieldContainer[bytes]
    sampled: _containers.RepeatedCompositeFieldContainer[SampleChunk]
    probe_s: float
    def __init__(self, fixed_logprobs: _Optional[_Iterable[bytes]] = ..., sampled: _Optional[_Iterable[_Union[SampleChunk, _Mapping]]] = ..., probe_s: _Optional[float] = ...) -> None: ...

class VerdictRequest(_message.Message):
    __slots__ = ("epoch", "version", "passed")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    passed: bool
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ..., passed: _Optional[bool] = ...) -> None: ...

class VerdictResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetVersionRequest(_message.Message):
    __slots__ = ("epoch", "version")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class SetVersionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
