"""What a server says of itself, between the contract's message and a value."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from asyppo_async.rpc.codec import dtype_of
from asyppo_async.rpc.v1 import fleet_pb2
from asyppo_async.weights.manifest import Dtype

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """The fields are those of the contract, by name, and documented there."""

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
    float32_head: bool
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


def encode_info(info: ServerInfo) -> fleet_pb2.ServerInfo:
    values: dict[str, Any] = {field.name: getattr(info, field.name) for field in fields(ServerInfo)}
    return fleet_pb2.ServerInfo(**(values | {"state": _STATES[info.state]}))


def decode_info(message: fleet_pb2.ServerInfo) -> ServerInfo:
    if message.state not in _STATE_NAMES:
        raise ValueError(f"unknown server state {message.state}")
    values: dict[str, Any] = {field.name: getattr(message, field.name) for field in fields(ServerInfo)}
    checked: dict[str, Any] = {
        "eos_token_ids": tuple(message.eos_token_ids),
        "dtype": dtype_of(message.dtype),
        "state": _STATE_NAMES[message.state],
    }
    return ServerInfo(**(values | checked))
