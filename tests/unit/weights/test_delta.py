"""Deltas of bfloat16 tensors: bitwise exact, whatever changed; small where little did."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyppo_async.errors import WeightSyncError
from asyppo_async.weights.delta import delta_of, unpacked
from asyppo_async.weights.host_copy import HostCopy
from asyppo_async.weights.manifest import Manifest, TensorSpec

SHAPES = ((40, 16), (0, 4), (1000,), ())


def manifest_of(*shapes: tuple[int, ...]) -> Manifest:
    return Manifest(
        tensors=tuple(
            TensorSpec(name=f"t{index}", shape=shape, dtype="bfloat16") for index, shape in enumerate(shapes)
        )
    )


def copy_of(manifest: Manifest, tensors: list[torch.Tensor], version: int) -> HostCopy:
    copy = HostCopy.empty(manifest)
    named = [(spec.name, tensor) for spec, tensor in zip(manifest.tensors, tensors, strict=True)]
    copy.hold(version, named)
    return copy


def named_in(manifest: Manifest, tensors: list[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return [(spec.name, tensor) for spec, tensor in zip(manifest.tensors, tensors, strict=True)]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), share=st.sampled_from([0.0, 0.001, 0.02, 0.5, 1.0]))
def test_delta_when_any_patterns_change_then_the_result_is_the_same_bit_for_bit(
    seed: int, share: float
) -> None:
    """Random bit patterns: NaN of every kind, infinities, both zeros, denormals."""
    random = np.random.default_rng(seed)
    before = random.integers(0, 2**16, 5000).astype(np.uint16)
    after = before.copy()
    changed = random.random(5000) < share
    after[changed] = random.integers(0, 2**16, int(changed.sum()))
    manifest = manifest_of((5000,))
    theirs = HostCopy(manifest, torch.from_numpy(before.copy().view(np.uint8)))
    theirs.complete(0, (0,))
    delta = delta_of(0, before, after)
    if delta is None:
        assert (before == after).all()
        return
    assert theirs.patch(1, np.frombuffer(delta.packed(), dtype=np.uint8)) == {0}
    assert (theirs.buffer.numpy().view(np.uint16) == after).all()
    assert theirs.version == 1 and theirs.verify()


def test_delta_when_positions_are_far_apart_then_their_gaps_are_right() -> None:
    before = np.zeros(3_000_000, dtype=np.uint16)
    after = before.copy()
    after[[0, 127, 255, 20_000, 2_999_999]] = [1, 2, 0xFFFF, 0x8000, 7]
    delta = delta_of(0, before, after)
    assert delta is not None
    # Gaps of 0, 126, 127, 19,744 and 2,979,998 elements take 1, 1, 1, 3 and 4 bytes.
    assert len(delta.gaps) == 10 and delta.steps.tolist()[:3] == [2, 4, 1]
    copy = HostCopy(manifest_of((3_000_000,)), torch.from_numpy(before.view(np.uint8)))
    copy.complete(0, (0,))
    copy.patch(1, np.frombuffer(delta.packed(), dtype=np.uint8))
    assert (copy.buffer.numpy().view(np.uint16) == after).all()


def test_copy_when_it_advances_then_both_ends_hold_the_same_and_the_checksums_of_it() -> None:
    manifest = manifest_of(*SHAPES)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in SHAPES]
    ours, theirs = copy_of(manifest, tensors, 4), copy_of(manifest, tensors, 4)
    tensors[2][5] += 1.0
    delta = ours.advance(5, named_in(manifest, tensors))
    assert [record.index for record in unpacked(delta)] == [2]
    assert theirs.patch(5, delta) == {2}
    assert torch.equal(ours.buffer, theirs.buffer)
    assert ours.checksums == theirs.checksums and ours.checksums[2] != 0
    assert len(ours.advance(6, named_in(manifest, tensors))) == 0


@pytest.mark.parametrize("damage", ["base", "byte", "cut", "index"])
def test_patch_when_something_is_wrong_then_refused_and_the_copy_holds_no_version(damage: str) -> None:
    manifest = manifest_of((500,))
    tensors = [torch.ones(500)]
    ours, theirs = copy_of(manifest, tensors, 1), copy_of(manifest, tensors, 1)
    delta = ours.advance(2, named_in(manifest, [torch.arange(500.0)])).copy()
    words = "the copies before it differed"
    if damage == "base":
        theirs.buffer[10] ^= 1
    elif damage == "byte":
        delta[-1] ^= 2
    elif damage == "cut":
        delta, words = delta[:-3], "ends within tensor 0"
    else:
        delta[0], words = 9, "a delta of tensor 9 of 1"
    with pytest.raises(WeightSyncError, match=words):
        theirs.patch(2, delta)
    assert theirs.version is None


def test_delta_when_a_learning_rate_is_small_then_it_is_far_smaller_than_the_tensor() -> None:
    """Steps of 1e-6, as AdamW takes them at that learning rate, on weights of usual size."""
    generator = torch.Generator().manual_seed(0)
    masters = torch.randn(400, 500, generator=generator) * 0.05
    before = masters.to(torch.bfloat16)
    masters += 1e-6 * torch.randn(400, 500, generator=generator).sign()
    after = masters.to(torch.bfloat16)
    changed = int((before != after).sum())
    assert changed > 0
    delta = delta_of(0, *(each.view(torch.uint16).numpy().reshape(-1) for each in (before, after)))
    assert delta is not None
    assert len(delta.packed()) < 4.5 * changed + 32, "a position, a step"
    assert len(delta.packed()) < before.nbytes / 20
