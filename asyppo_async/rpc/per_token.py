"""What a response may carry per token besides ids and log-probs: the sets sampled from, and the experts used."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from asyppo_async.rpc.v1 import fleet_pb2
from asyppo_async.types import Int16Array, KeptTokens

_BYTE_EXPERTS = 256
_ITEM_TYPES: dict[int, Literal["u1", "<u2"]] = {1: "u1", 2: "<u2"}


def encode_kept(kept: KeptTokens) -> fleet_pb2.KeptTokens:
    return fleet_pb2.KeptTokens(
        token_ids=np.ascontiguousarray(kept.token_ids, dtype="<i4").tobytes(),
        counts=np.ascontiguousarray(kept.counts, dtype="<u2").tobytes(),
    )


def decode_kept(message: fleet_pb2.KeptTokens, num_tokens: int) -> KeptTokens:
    """Raise `ValueError` unless there is one set per token, and none is empty."""
    if len(message.token_ids) % 4 or len(message.counts) != 2 * num_tokens:
        raise ValueError(
            f"kept sets of {num_tokens} tokens: {len(message.counts)} bytes of counts, "
            f"{len(message.token_ids)} bytes of ids"
        )
    kept = KeptTokens(
        token_ids=np.frombuffer(message.token_ids, dtype="<i4").astype(np.int32, copy=False),
        counts=np.frombuffer(message.counts, dtype="<u2").astype(np.int32),
    )
    if int(kept.counts.sum()) != len(kept.token_ids) or not kept.counts.all():
        raise ValueError(f"kept sets of {kept.counts.tolist()} tokens have {len(kept.token_ids)} ids")
    return kept


def joined_kept(parts: Sequence[KeptTokens | None]) -> KeptTokens | None:
    """Of consecutive chunks; None if one has none, as the begun tokens of a moved response."""
    present = [part for part in parts if part is not None]
    if not present or len(present) < len(parts):
        return None
    return KeptTokens(
        token_ids=np.concatenate([part.token_ids for part in present]),
        counts=np.concatenate([part.counts for part in present]),
    )


def encode_experts(experts: Int16Array) -> fleet_pb2.RoutedExperts:
    """Args:
    experts: [positions, layers, experts per token], none negative.
    """
    item_bytes = 1 if not experts.size or int(experts.max()) < _BYTE_EXPERTS else 2
    return fleet_pb2.RoutedExperts(
        num_layers=experts.shape[1],
        experts_per_token=experts.shape[2],
        item_bytes=item_bytes,
        expert_ids=np.ascontiguousarray(experts, dtype=_ITEM_TYPES[item_bytes]).tobytes(),
    )


def decode_experts(message: fleet_pb2.RoutedExperts) -> Int16Array:
    """[positions, layers, experts per token]; `ValueError` for bytes that are no such array."""
    row = message.num_layers * message.experts_per_token * message.item_bytes
    if message.item_bytes not in _ITEM_TYPES or not row or len(message.expert_ids) % row:
        raise ValueError(
            f"experts of {message.num_layers} layers, {message.experts_per_token} each, {message.item_bytes} bytes "
            f"an item, do not fit {len(message.expert_ids)} bytes"
        )
    flat = np.frombuffer(message.expert_ids, dtype=_ITEM_TYPES[message.item_bytes])
    if flat.size and int(flat.max()) > np.iinfo(np.int16).max:
        raise ValueError(f"there is no expert {int(flat.max())}")
    return flat.astype(np.int16).reshape(-1, message.num_layers, message.experts_per_token)
