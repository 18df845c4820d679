"""Messages as frames: what arrives is what was sent, or an error; nothing else, and never a pickle."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyppo_async.errors import WorkerError
from asyppo_async.trainer.worker.codec import FrameBuffer, Message, decode, encode
from asyppo_async.trainer.worker.control import Footprint, Heartbeat, Hello, Loaded
from asyppo_async.trainer.worker.messages import (
    ActorForward,
    CriticTrain,
    MiniBatches,
    OptimizerStep,
    PartNorms,
    TrainResult,
)
from asyppo_async.types import concatenate_sequences
from asyppo_async.weights.manifest import Manifest, TensorSpec

SEQUENCES = concatenate_sequences([([1, 2], np.array([3, 4, 5], dtype=np.int32))])
FORWARD = ActorForward(sequences=SEQUENCES, temperature=0.5)
STEP = OptimizerStep(
    loss=1.5,
    grad_norm=0.25,
    learning_rate=1e-6,
    skipped=False,
    num_tokens=3,
    entropy=math.nan,
    clip_fraction_low=0.0,
    clip_fraction_high=0.5,
    ratio_mean=1.0,
    ratio_max=math.inf,
    kl_proximal=0.0,
    parts=PartNorms(head_gradient=0.5, backbone_gradient=1.5, head_weights=0.25, backbone_weights=9.0),
)


def changed(frames: list[FrameBuffer], **changes: object) -> list[FrameBuffer]:
    """The frames with fields of the header's body replaced."""
    header = json.loads(bytes(frames[0]))
    header["body"].update(changes)
    return [json.dumps(header).encode(), *frames[1:]]


def test_request_with_arrays_arrives_with_the_same_numbers_types_and_envelope() -> None:
    train = CriticTrain(
        sequences=SEQUENCES,
        targets=np.array([1, -1, 0.5], dtype=np.float32),
        weights=np.array([0, 1, np.nan], dtype=np.float32),
        old_values=np.zeros(3, dtype=np.float32),
        mini_batches=MiniBatches(
            sequence_indices=np.array([0], dtype=np.int32),
            sizes=np.array([1], dtype=np.int32),
            denominators=np.array([3.0]),
        ),
        value_clip=None,
    )
    envelope = decode(encode(train, request_id=7, deadline_s=2.5))
    got = envelope.message
    assert isinstance(got, CriticTrain)
    assert (envelope.request_id, envelope.deadline_s, got.value_clip) == (7, 2.5, None)
    np.testing.assert_array_equal(got.weights, train.weights)
    np.testing.assert_array_equal(got.sequences.response_token_ids, [3, 4, 5])
    assert got.mini_batches.denominators.dtype == np.float64


def test_arrays_when_encoded_are_views_and_when_decoded_are_read_only() -> None:
    frames = encode(FORWARD)
    sent = SEQUENCES.response_token_ids
    assert any(np.shares_memory(np.frombuffer(frame, dtype=np.uint8), sent) for frame in frames[1:])
    got = decode(frames).message
    assert isinstance(got, ActorForward)
    assert np.shares_memory(got.sequences.response_token_ids, sent)
    assert not got.sequences.response_token_ids.flags.writeable


@pytest.mark.parametrize(
    "message",
    [
        Heartbeat(),
        Hello(role="critic", name="", host="::1", pid=3, devices=("cpu", "cuda:0"), critic=None),
        Loaded(
            vocab_size=20,
            tokenizer_fingerprint="",
            num_parameters=5,
            manifest=Manifest(tensors=(TensorSpec(name="a.weight", shape=(2, 3), dtype="bfloat16"),)),
            footprint=Footprint(
                device="cpu of a", on_host=True, free_bytes=None, weight_bytes=1, state_bytes=2
            ),
        ),
    ],
)
def test_nested_values_arrive_equal(message: Message) -> None:
    assert decode(encode(message)).message == message


def test_numbers_that_are_not_finite_arrive() -> None:
    got = decode(encode(TrainResult(steps=(STEP, STEP), compute_s=1.0))).message
    assert isinstance(got, TrainResult)
    assert math.isnan(got.steps[1].entropy) and got.steps[1].ratio_max == math.inf


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([], "no frames"),
        ([b""], "Expecting value"),
        ([b"\x80\x04."], "malformed"),
        ([b"[" * 100_000], "malformed"),
        ([b'{"kind":"Popen","request_id":0,"deadline_s":0,"body":{}}'], "no known kind"),
        ([b'{"kind":"Heartbeat","request_id":"0","deadline_s":0,"body":{}}'], "request_id is a str"),
        ([b'{"kind":"Heartbeat","request_id":0,"deadline_s":0,"body":{"x":1}}'], "has fields"),
        ([b'{"kind":"Heartbeat","request_id":0,"deadline_s":0,"body":{}}', b"1234"], "comes with 1 arrays"),
        (encode(FORWARD)[:-1], "refers to frame"),
        ([*encode(FORWARD)[:-1], b"123"], "4 bytes, got 3"),
        (changed(encode(FORWARD), temperature="hot"), "temperature is a str"),
        (changed(encode(FORWARD), temperature=True), "temperature is a bool"),
        (changed(encode(FORWARD), sequences=None), "sequences must be an object"),
    ],
)
def test_garbage_is_refused_with_what_is_wrong(frames: list[FrameBuffer], words: str) -> None:
    with pytest.raises(WorkerError, match=words):
        decode(frames)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        ({"array": 0, "dtype": "object", "shape": [2]}, "is of type object, expected int32"),
        ({"array": 0, "dtype": "float32", "shape": [2]}, "is of type float32, expected int32"),
        ({"array": -1, "dtype": "int32", "shape": [2]}, "refers to frame -1"),
        ({"array": 0, "dtype": "int32", "shape": [-2]}, "has shape"),
        ({"array": 0, "dtype": "int32", "shape": [2**62]}, "bytes, got"),
        ([1, 2], "must describe an array"),
    ],
)
def test_array_that_is_not_as_described_is_refused(array: object, words: str) -> None:
    frames = encode(FORWARD)
    body = json.loads(bytes(frames[0]))["body"]
    with pytest.raises(WorkerError, match=words):
        decode(changed(frames, sequences=body["sequences"] | {"prompt_token_ids": array}))


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_any_bytes_are_refused_and_nothing_else_happens(frames: list[bytes]) -> None:
    with pytest.raises(WorkerError):
        decode(frames)


def test_lengths_that_do_not_add_up_are_refused_on_arrival() -> None:
    frames = encode(FORWARD)
    lengths = encode(FORWARD)[2]
    assert np.frombuffer(lengths, dtype=np.int32).tolist() == [2]
    frames[2] = np.array([3], dtype=np.int32).tobytes()
    with pytest.raises(WorkerError, match="prompt lengths sum to 3, got 2"):
        decode(frames)
