"""The longer messages that a fleet client sends."""

from collections.abc import Sequence

from asyppo_async.rpc import codec
from asyppo_async.rpc.calls import GenerateCall, KvOnUpdate, SessionPlace
from asyppo_async.rpc.v1 import fleet_pb2
from asyppo_async.types import Int32Array, SamplingParams
from asyppo_async.weights.manifest import Manifest


def generate_request(call: GenerateCall) -> fleet_pb2.GenerateRequest:
    return fleet_pb2.GenerateRequest(
        run_id=call.run_id,
        incarnation=call.incarnation,
        request_id=call.request_id,
        prompt_id=call.prompt_id,
        prompt_token_ids=codec.pack_ids(call.prompt_token_ids),
        num_samples=call.num_samples,
        sampling=codec.encode_sampling(call.sampling),
        begun=[
            fleet_pb2.BegunSample(
                sample_index=sample.sample_index, token_ids=codec.pack_ids(sample.token_ids)
            )
            for sample in call.begun
        ],
        return_kept_tokens=call.return_kept_tokens,
        return_routed_experts=call.return_routed_experts,
    )


def open_session_request(
    place: SessionPlace, manifest: Manifest, deadline_s: float
) -> fleet_pb2.OpenSessionRequest:
    return fleet_pb2.OpenSessionRequest(
        run_id=place.run_id,
        incarnation=place.incarnation,
        epoch=place.epoch,
        rank=place.rank,
        world_size=place.world_size,
        backend=place.backend,
        store_host=place.store_host,
        store_port=place.store_port,
        manifest=codec.encode_manifest(manifest),
        bucket_bytes=place.bucket_bytes,
        lease_s=place.lease_s,
        way=place.way,
        folder=place.folder,
        deadline_s=deadline_s,
    )


def stage_request(
    epoch: int, version: int, deadline_s: float, base_version: int, kv_on_update: KvOnUpdate
) -> fleet_pb2.StageRequest:
    return fleet_pb2.StageRequest(
        epoch=epoch,
        version=version,
        deadline_s=deadline_s,
        base_version=base_version,
        kv_on_update=kv_on_update,
    )


def probe_request(
    epoch: int,
    version: int,
    fixed: Sequence[Int32Array],
    prompts: Sequence[Int32Array],
    sampling: SamplingParams,
    deadline_s: float,
) -> fleet_pb2.ProbeRequest:
    return fleet_pb2.ProbeRequest(
        epoch=epoch,
        version=version,
        fixed_token_ids=[codec.pack_ids(sequence) for sequence in fixed],
        prompt_token_ids=[codec.pack_ids(prompt) for prompt in prompts],
        sampling=codec.encode_sampling(sampling),
        deadline_s=deadline_s,
    )
