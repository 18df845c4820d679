import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyppo_async.algorithms.trust_masks import (
    EntropyTracker,
    gepo_entropy_scale,
    m2po_keep,
    opsm_keep,
    track_entropy,
)

F64 = torch.float64
LOGS = torch.tensor([0.9, -0.6, 0.3, 0.2, -0.15, 0.1, 0.05, -0.02], dtype=F64)


def slow_m2po(logs, threshold, strict):
    kept = list(range(len(logs)))

    def too_large():
        mean = sum(logs[i] ** 2 for i in kept) / len(kept)
        return mean >= threshold if strict else mean > threshold

    while kept and too_large():
        kept.remove(max(kept, key=lambda i: (abs(logs[i]), -i)))
    return [i in kept for i in range(len(logs))]


def test_m2po_when_all_tokens_are_candidates_then_golden(golden, check):
    keep = m2po_keep(LOGS, threshold=0.04, candidates="all")
    check(keep.double(), golden["m2po_all"])
    check(torch.stack([LOGS.square().mean(), LOGS[keep].square().mean()]), golden["m2po_M2_before_after"])


def test_m2po_when_only_moved_tokens_are_candidates_then_golden(golden, check):
    advantages = torch.tensor([1, -1, -1, 1, 1, -1, 1, 1], dtype=F64)
    check(
        m2po_keep(LOGS, threshold=0.04, advantages=advantages).double(), golden["m2po_trust_region_only"][1]
    )


@given(
    st.lists(st.sampled_from([0.0, 0.1, -0.1, 0.5, -0.5, 2.0]), max_size=10),
    st.sampled_from([0.0, 0.0137, 0.0413, 0.2611, 9.0]),
    st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_m2po_when_sizes_tie_then_equals_dropping_one_at_a_time(logs, threshold, strict):
    packed = torch.tensor([*logs, torch.nan], dtype=F64)
    valid = torch.tensor([True] * len(logs) + [False])
    keep = m2po_keep(packed, threshold=threshold, candidates="all", strict=strict, valid=valid)
    assert keep.tolist() == [*slow_m2po(logs, threshold, strict), False]


def test_opsm_when_advantage_or_divergence_allows_then_golden(golden):
    lengths = torch.tensor([1, 1, 1])
    advantages = torch.tensor([-1.0, 1.0, -1.0])
    keep = opsm_keep(advantages, torch.tensor([-0.02, -0.02, -0.005]), lengths, threshold=0.01)
    assert keep.tolist() == list(golden["opsm"].values())


def test_opsm_when_invalid_tokens_hold_nan_then_mean_over_the_valid():
    keep = opsm_keep(
        torch.tensor([-1.0]),
        torch.tensor([-0.02, torch.nan]),
        torch.tensor([2]),
        threshold=0.015,
        valid=torch.tensor([True, False]),
    )
    assert keep.tolist() == [False]


def test_gepo_entropy_when_group_is_sharp_or_flat_then_golden(golden, check):
    scaled = gepo_entropy_scale(
        torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=F64),
        torch.tensor([0.4, 0.4, 0.6, 0.6], dtype=F64),
        EntropyTracker(mean=0.5, variance=0.01),
        low_width=0.2,
        high_width=0.3,
        low_factor=0.5,
        high_factor=0.2,
    )
    check(scaled, golden["gepo_entropy"])


def test_entropy_tracker_when_batches_come_then_moving_average():
    first = track_entropy(None, torch.tensor([0.4, 0.6]), rate=0.01)
    assert (first.mean, first.std) == pytest.approx((0.5, 0.1), rel=1e-6)
    second = track_entropy(first, torch.tensor([1.5, 1.5]), rate=0.01)
    assert second.mean == pytest.approx(0.51, rel=1e-6)
    assert second.variance == pytest.approx(0.0099, rel=1e-5)
