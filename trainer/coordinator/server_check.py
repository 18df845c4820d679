"""Waiting for a server, and whether it is one that a trainer can use."""

import asyncio
import time
from dataclasses import dataclass

from asyppo_async.errors import FleetMismatch, FleetUnavailable
from asyppo_async.fingerprint import ModelIdentity
from asyppo_async.rpc.client import FleetClient
from asyppo_async.rpc.info import ServerInfo
from asyppo_async.rpc.member import INFO_DEADLINE_S

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What every server must have in common with the trainer."""

    identity: ModelIdentity
    """Of the trainer's own model folder."""
    dtype: str
    """Type of the weights that are published."""
    longest_tokens: int
    """Longest prompt plus longest response that will be asked for."""
    float32_head: bool = False
    """Whether the trainer computes logits in float32 beside weights of lower precision."""
    routed_experts: bool = False
    """Every response has to say which experts were used; a server that cannot refuses the first call."""


async def check_joining(client: FleetClient, expected: Expected, join_timeout_s: float) -> ServerInfo:
    """Wait until a server is ready.

    Raises:
        FleetUnavailable: it is not there, or not ready, within `join_timeout_s`.
        FleetMismatch: it has another model, tokenizer, vocabulary, type or length; names both sides.
    """
    info = await _wait_until_ready(client, join_timeout_s)
    differences = differences_of(info, expected)
    if differences:
        raise FleetMismatch(
            f"server {client.address} (--model {info.model_name}) does not fit this trainer: "
            f"{'; '.join(differences)}"
        )
    return info


async def _wait_until_ready(client: FleetClient, join_timeout_s: float) -> ServerInfo:
    deadline_at_s = time.monotonic() + join_timeout_s
    pause_s = _FIRST_PAUSE_S
    while True:
        left_s = deadline_at_s - time.monotonic()
        try:
            info = await client.info(max(min(left_s, INFO_DEADLINE_S), _FIRST_PAUSE_S))
        except FleetUnavailable as error:
            last = str(error)
        else:
            if info.state == "failed":
                raise FleetUnavailable(f"server {client.address} has failed; its own log says why")
            if info.state not in ("starting", "draining"):
                return info
            last = f"it is {info.state}"
        if deadline_at_s - time.monotonic() < pause_s:
            raise FleetUnavailable(
                f"fleet server {client.address} was not ready within {join_timeout_s:g} s ({last}); start it with "
                f"`asyppo-fleet serve`, or correct --fleet"
            )
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def differences_of(info: ServerInfo, expected: Expected) -> list[str]:
    """One clause for each way in which a server does not fit; each names both sides."""
    identity = expected.identity
    pairs: list[tuple[str, object, object]] = [
        ("model architecture", info.model_fingerprint, identity.model_fingerprint),
        ("tokenizer", info.tokenizer_fingerprint, identity.tokenizer_fingerprint),
        ("vocabulary size", info.vocab_size, identity.vocab_size),
        ("end-of-text ids", sorted(info.eos_token_ids), sorted(identity.eos_token_ids)),
        ("type of the weights", info.dtype, expected.dtype),
    ]
    lines = [f"{what} is {theirs} there, {ours} here" for what, theirs, ours in pairs if theirs != ours]
    if info.float32_head != expected.float32_head:
        lines.append(
            f"its --float32-head is {str(info.float32_head).lower()} and actor.float32_head is "
            f"{str(expected.float32_head).lower()}, so log-probs of both sides differ: set both or none"
        )
    if info.max_model_len < expected.longest_tokens:
        lines.append(
            f"it takes {info.max_model_len} tokens of prompt and response, the run needs {expected.longest_tokens}"
        )
    if info.max_model_len > identity.max_positions:
        lines.append(
            f"it takes {info.max_model_len} tokens, the trainer's model is made for {identity.max_positions}"
        )
    return lines
