"""Hostile messages for a live server: bytes of the wire, made by chance from a seed."""

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass

from asyppo_async.rpc import codec
from asyppo_async.rpc.v1 import fleet_pb2
from asyppo_async.types import SamplingParams

SAMPLING = codec.encode_sampling(
    SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_tokens=0, max_tokens=8, stop_token_ids=(1,))
)
GENERATE = fleet_pb2.GenerateRequest(
    request_id="fuzz",
    prompt_id="p",
    prompt_token_ids=codec.pack_ids([3, 4, 5]),
    num_samples=2,
    sampling=SAMPLING,
)
PROBE = fleet_pb2.ProbeRequest(
    epoch=1, version=1, fixed_token_ids=[codec.pack_ids([1, 2])], sampling=SAMPLING, deadline_s=0.1
)
VALID: dict[str, bytes] = {
    "Rollout/GetInfo": fleet_pb2.GetInfoRequest().SerializeToString(),
    "Rollout/WatchInfo": fleet_pb2.WatchInfoRequest(interval_s=5).SerializeToString(),
    "Rollout/Generate": GENERATE.SerializeToString(),
    "Rollout/Cancel": fleet_pb2.CancelRequest(request_id="fuzz", sample_indices=[0]).SerializeToString(),
    "WeightSession/Stage": fleet_pb2.StageRequest(epoch=1, version=1, deadline_s=0.1).SerializeToString(),
    "WeightSession/Commit": fleet_pb2.CommitRequest(
        epoch=1, version=1, kv_on_update="keep"
    ).SerializeToString(),
    "WeightSession/Probe": PROBE.SerializeToString(),
    "WeightSession/Verdict": fleet_pb2.VerdictRequest(epoch=1, version=1, passed=True).SerializeToString(),
    "WeightSession/SetVersion": fleet_pb2.SetVersionRequest(epoch=1, version=1).SerializeToString(),
    "WeightSession/CloseSession": fleet_pb2.CloseSessionRequest(epoch=1).SerializeToString(),
    # Not a valid session, or the server would wait for a sender that the message names.
    "WeightSession/OpenSession": fleet_pb2.OpenSessionRequest(run_id="r", backend="nccl").SerializeToString(),
    # Not a valid grace, or the server would drain.
    "Admin/Drain": fleet_pb2.DrainRequest(grace_s=float("nan")).SerializeToString(),
    "Rollout/NoSuchMethod": b"",
}
STREAMS = ("Rollout/WatchInfo", "Rollout/Generate")
_EXTREMES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
_FLOATS = (0.0, -0.0, 1e-38, 1e38, float("inf"), float("-inf"), float("nan"), -1.0)


@dataclass(frozen=True, slots=True)
class Hostile:
    method: str
    data: bytes


def hostile(seed: int, count: int) -> list[Hostile]:
    """So many messages, the same for a seed on every machine."""
    chance = random.Random(seed)
    return [_one(chance) for _ in range(count)]


def _one(chance: random.Random) -> Hostile:
    method = chance.choice(list(VALID))
    kinds: list[Callable[[random.Random, bytes], bytes]] = [_noise, _truncated]
    if method == "Rollout/Generate":
        return Hostile(
            method, chance.choice([*kinds, _mutated, _odd_fields, _odd_fields])(chance, VALID[method])
        )
    if method == "Admin/Drain":  # nearly all else is a valid one, the empty message too
        return Hostile(method, VALID[method])
    if method != "WeightSession/OpenSession":  # a change by chance could name a sender that is waited for
        kinds += [_mutated]
    return Hostile(method, chance.choice(kinds)(chance, VALID[method]))


def _noise(chance: random.Random, _: bytes) -> bytes:
    return chance.randbytes(chance.choice([0, 1, 3, 17, 200, 5000]))


def _truncated(chance: random.Random, data: bytes) -> bytes:
    return data[: chance.randrange(len(data))] if data else b""


def _mutated(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data or b"\x08")
    for _ in range(chance.randint(1, 4)):
        match chance.randrange(3):
            case 0:
                changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
            case 1:
                changed.insert(chance.randrange(len(changed) + 1), chance.randrange(256))
            case _:
                at = chance.randrange(len(changed))
                changed[at:at] = struct.pack("<d", chance.choice(_FLOATS))
    return bytes(changed)


def _odd_fields(chance: random.Random, _: bytes) -> bytes:
    """A message that decodes, with a field that nobody should send."""
    request = fleet_pb2.GenerateRequest()
    request.CopyFrom(GENERATE)
    odd_ids = [chance.choice([*_EXTREMES[:3], -1, -(2**31), 63, 64]) for _ in range(chance.randint(0, 5))]
    match chance.randrange(9):
        case 0:
            request.num_samples = chance.choice([value for value in _EXTREMES if value < 2**32])
        case 1:
            request.prompt_token_ids = codec.pack_ids(odd_ids)
        case 2:
            request.prompt_token_ids = bytes(chance.choice([0, 1, 2, 4 * 511, 4 * 512, 4 * 100_000, 2**21]))
        case 3:
            request.sampling.temperature = chance.choice(_FLOATS)
        case 4:
            request.sampling.top_p = chance.choice(_FLOATS)
        case 5:
            request.sampling.max_tokens = chance.choice([0, 2**31, 2**32 - 1])
        case 6:
            request.sampling.stop_token_ids.extend(
                [chance.choice([63, 64, 2**32 - 1])] * chance.choice([1, 2000])
            )
        case 7:
            request.run_id = chance.choice(["\0", "x" * 100_000, "\u202e", "' OR 1=1"])
        case _:
            request.return_kept_tokens = request.return_routed_experts = True
            request.begun.add(
                sample_index=chance.choice([0, 1, 2**32 - 1]), token_ids=codec.pack_ids(odd_ids)
            )
    return request.SerializeToString()
