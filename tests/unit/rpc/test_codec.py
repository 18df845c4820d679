import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyppo_async.rpc import codec
from asyppo_async.rpc.codec import SampleTokens
from asyppo_async.rpc.info import ServerInfo, decode_info, encode_info
from asyppo_async.rpc.v1 import fleet_pb2
from asyppo_async.types import SamplingParams, VersionRuns
from asyppo_async.weights.manifest import Manifest, TensorSpec


def tokens(
    *ids: int, versions: tuple[int, ...] | None = None, finish_reason: str | None = None
) -> SampleTokens:
    return SampleTokens(
        sample_index=3,
        token_ids=np.array(ids, np.int32),
        behaviour_logprobs=np.array([-0.5] * len(ids), np.float32),
        versions=VersionRuns.of(versions or [0] * len(ids)),
        finish_reason=finish_reason,  # type: ignore[arg-type]
    )


def test_pack_ids_when_packed_then_bytes_are_little_endian() -> None:
    assert codec.pack_ids([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    assert codec.unpack_ids(b"\x01\x00\x00\x00\x02\x01\x00\x00").tolist() == [1, 258]
    assert codec.pack_logprobs([-1.0]) == b"\x00\x00\x80\xbf"


def test_unpack_when_bytes_are_no_whole_numbers_then_it_is_refused() -> None:
    with pytest.raises(ValueError, match="token ids are 4 bytes each, got 7 bytes"):
        codec.unpack_ids(b"1234567")
    with pytest.raises(ValueError, match="log-probs are 4 bytes each, got 1 bytes"):
        codec.unpack_logprobs(b"1")


@given(
    runs=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=6),
    start=st.integers(0, 2**31 - 100),
)
def test_version_runs_when_encoded_and_decoded_then_every_token_has_its_version(
    runs: list[tuple[int, int]], start: int
) -> None:
    versions = np.array(
        [start + version for version, count in sorted(runs) for _ in range(count)], dtype=np.int32
    )
    chunk = tokens(*range(len(versions)), versions=tuple(versions.tolist()))
    message = codec.encode_chunk(chunk)
    assert len(message.version_runs) == len(set(versions.tolist()))
    assert codec.decode_chunk(message).versions.per_token().tolist() == versions.tolist()
    assert codec.decode_chunk(message).versions == chunk.versions


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([(0, 2)], "3 tokens, 3 log-probs, version runs of 2 tokens"),
        ([(0, 3), (1, 1)], "version runs of 4 tokens"),
        ([(0, 3), (1, 0)], "has a token at least"),
        ([(2, 1), (1, 2)], "never fall"),
        ([(-1, 3)], "never fall"),
        ([(2**31, 3)], "31-bit numbers"),
        ([], "version runs of 0 tokens"),
    ],
)
def test_chunk_when_its_version_runs_cannot_be_then_it_is_refused(
    runs: list[tuple[int, int]], message: str
) -> None:
    chunk = codec.encode_chunk(tokens(1, 2, 3))
    del chunk.version_runs[:]
    chunk.version_runs.extend(
        fleet_pb2.VersionRun(version=version, num_tokens=count) for version, count in runs
    )
    with pytest.raises(ValueError, match=message):
        codec.decode_chunk(chunk)


@pytest.mark.parametrize("finish_reason", [None, "stop", "length"])
def test_chunk_when_encoded_and_decoded_then_it_is_the_same(finish_reason: str | None) -> None:
    chunk = tokens(7, 8, 9, versions=(4, 4, 5), finish_reason=finish_reason)
    again = codec.decode_chunk(
        fleet_pb2.SampleChunk.FromString(codec.encode_chunk(chunk).SerializeToString())
    )
    assert (again.sample_index, again.finish_reason) == (3, finish_reason)
    assert again.versions == chunk.versions
    for name in ("token_ids", "behaviour_logprobs"):
        ours, theirs = getattr(chunk, name), getattr(again, name)
        assert ours.dtype == theirs.dtype
        assert ours.tolist() == theirs.tolist()


def test_decode_chunk_when_a_log_prob_is_missing_then_it_is_refused() -> None:
    message = codec.encode_chunk(tokens(1, 2))
    message.logprobs = codec.pack_logprobs([-1.0])
    with pytest.raises(ValueError, match="sample 3: 2 tokens, 1 log-probs"):
        codec.decode_chunk(message)


def test_response_of_when_chunks_cross_an_update_then_versions_follow_each_other() -> None:
    response = codec.response_of(
        [tokens(1, 2, versions=(4, 4)), tokens(), tokens(3, versions=(5,), finish_reason="stop")]
    )
    assert response.token_ids.tolist() == [1, 2, 3]
    assert response.versions.per_token().tolist() == [4, 4, 5]
    assert response.finish_reason == "stop"


@pytest.mark.report("P34")
def test_response_of_when_chunks_make_no_response_then_it_is_refused() -> None:
    with pytest.raises(ValueError, match="never fall"):
        codec.response_of([tokens(1, versions=(5,)), tokens(2, versions=(4,), finish_reason="stop")])
    with pytest.raises(ValueError, match="says why it ended"):
        codec.response_of([tokens(1)])
    with pytest.raises(ValueError, match="says why it ended"):
        codec.response_of([])
    with pytest.raises(ValueError, match="without a token"):
        codec.response_of([tokens(finish_reason="length")])


@pytest.mark.parametrize(
    ("logprob", "poisoned"), [(-3.0, False), (-math.inf, False), (math.nan, True), (math.inf, True)]
)
def test_is_poisoned_when_a_log_prob_is_no_log_prob_then_it_is_reported(
    logprob: float, poisoned: bool
) -> None:
    again = codec.unpack_logprobs(codec.pack_logprobs([-1.0, logprob]))
    assert codec.is_poisoned(again) is poisoned


def test_sampling_when_sent_then_numbers_are_those_that_a_person_wrote() -> None:
    sampling = SamplingParams(
        temperature=0.7, top_p=0.95, top_k=0, min_tokens=0, max_tokens=9, stop_token_ids=(2, 1)
    )
    message = codec.encode_sampling(sampling)
    again = fleet_pb2.SamplingParams.FromString(message.SerializeToString())
    assert codec.decode_sampling(again) == sampling


def info(**changes: object) -> ServerInfo:
    values: dict[str, object] = {
        "server_id": "s",
        "model_name": "m",
        "model_fingerprint": "f",
        "tokenizer_fingerprint": "t",
        "vocab_size": 11,
        "eos_token_ids": (1, 2),
        "max_model_len": 64,
        "max_num_seqs": 8,
        "num_workers": 1,
        "dtype": "float32",
        "state": "serving",
        "run_id": "r",
        "incarnation": 2,
        "served_version": -1,
        "num_running_samples": 3,
        "num_queued_samples": 4,
        "sent_tokens": 5,
        "sent_tokens_per_s": 1.5,
        "session_epoch": 6,
        "session_world_size": 3,
        "uptime_s": 7.25,
        "kv_cache_usage": 0.5,
        "float32_head": True,
    }
    return ServerInfo(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "state", ["starting", "weights_unknown", "serving", "updating", "draining", "failed"]
)
def test_info_when_sent_then_it_is_the_same(state: str) -> None:
    ours = info(state=state)
    message = fleet_pb2.ServerInfo.FromString(encode_info(ours).SerializeToString())
    assert decode_info(message) == ours


def test_decode_info_when_state_or_type_are_unknown_then_it_is_refused() -> None:
    message = encode_info(info())
    message.dtype = "int4"
    with pytest.raises(ValueError, match="float32 or bfloat16, got 'int4'"):
        decode_info(message)
    message = encode_info(info())
    message.state = fleet_pb2.SERVER_STATE_UNSPECIFIED
    with pytest.raises(ValueError, match="unknown server state 0"):
        decode_info(message)


def test_manifest_when_sent_then_it_is_the_same() -> None:
    manifest = Manifest(
        tensors=(
            TensorSpec(name="a", shape=(2, 3), dtype="bfloat16"),
            TensorSpec(name="b", shape=(), dtype="float32"),
        )
    )
    message = fleet_pb2.Manifest.FromString(codec.encode_manifest(manifest).SerializeToString())
    assert codec.decode_manifest(message) == manifest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kept": fleet_pb2.KeptTokens(token_ids=bytes(8), counts=bytes(2))}, "2 bytes of counts"),
        ({"kept": fleet_pb2.KeptTokens(token_ids=bytes(8), counts=b"\2\0\0\0")}, r"kept sets of \[2, 0\]"),
        ({"kept": fleet_pb2.KeptTokens(token_ids=bytes(7), counts=bytes(4))}, "7 bytes of ids"),
        ({"routed_experts": fleet_pb2.RoutedExperts(num_layers=1)}, "do not fit"),
        (
            {
                "routed_experts": fleet_pb2.RoutedExperts(
                    num_layers=1, experts_per_token=1, item_bytes=2, expert_ids=b"\xff\xff"
                )
            },
            "no expert 65535",
        ),
        ({"error": fleet_pb2.SampleError(kind=77)}, "unknown kind of error 77"),  # type: ignore[arg-type]
    ],
)
def test_decode_chunk_when_what_it_carries_is_no_array_then_refused(
    changes: dict[str, object], message: str
) -> None:
    values: dict[str, object] = {
        "token_ids": codec.pack_ids([3, 4]),
        "logprobs": codec.pack_logprobs([-1.0, -2.0]),
        "version_runs": [fleet_pb2.VersionRun(version=1, num_tokens=2)],
    }
    with pytest.raises(ValueError, match=message):
        codec.decode_chunk(fleet_pb2.SampleChunk(**values, **changes))  # type: ignore[arg-type]
