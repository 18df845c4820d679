import math

import pytest
import torch

from asyppo_async.algorithms.breakdowns import (
    clip_shares,
    enough_effective_samples,
    mask_overlaps,
    masked_correlation,
    masked_mean,
    rejection_shares,
)
from asyppo_async.algorithms.calibration import (
    brier_score,
    calibration_bins,
    calibration_by_position,
    critic_agreement,
    explained_variance_by_length,
    explained_variance_by_position,
    mean_by_position,
    part_lengths,
    ranking_quality,
    relative_position,
    share_by_length,
    value_by_outcome,
)
from asyppo_async.algorithms.confidence import (
    confidence_value,
    initial_calibration,
    prediction_bins,
    update_calibration,
)
from asyppo_async.algorithms.losses import ppo_clip
from asyppo_async.algorithms.metrics import explained_variance_sums
from asyppo_async.algorithms.packed import segment_ids

F64 = torch.float64


def test_position_when_responses_are_cut_into_quarters_then_floor_of_the_share():
    assert relative_position(torch.tensor([4, 0, 2, 6]), 4).tolist() == [0, 1, 2, 3, 0, 2, 0, 0, 1, 2, 2, 3]


@pytest.mark.parametrize("num_parts", [1, 3, 4, 10])
def test_part_lengths_when_responses_are_shorter_and_longer_than_the_parts_then_a_count_of_positions(
    num_parts,
):
    lengths = torch.tensor([5, 9, 0, 2, 1, 37])
    part = relative_position(lengths, num_parts) + num_parts * segment_ids(lengths)
    expected = torch.bincount(part, minlength=num_parts * len(lengths))
    assert part_lengths(lengths, num_parts).tolist() == expected.tolist()


def test_explained_variance_by_place_when_invalid_tokens_hold_nan_then_the_loop_over_tokens():
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([5, 9, 3])
    returns, values = torch.randn(2, 17, generator=generator, dtype=F64)
    valid = torch.rand(17, generator=generator) > 0.3
    returns, values = returns.where(valid, torch.nan), values.where(valid, torch.inf)
    part = relative_position(lengths, 4)
    for index, got in enumerate(explained_variance_by_position(returns, values, lengths, valid=valid)):
        assert got.count == int((valid & (part == index)).sum())
        expected = explained_variance_sums(returns, values, valid & (part == index))
        assert got.explained_variance == pytest.approx(expected.explained_variance, nan_ok=True)
        assert got.bias == pytest.approx(expected.bias, nan_ok=True)


def test_explained_variance_when_split_by_position_or_length_then_parts_add_to_the_whole():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 9, 2])
    returns, values = torch.randn(2, 16, generator=generator, dtype=F64)
    by_position = explained_variance_by_position(returns, values, lengths)
    by_length = explained_variance_by_length(returns, values, lengths, edges=[2, 5])
    assert [part.count for part in by_length] == [2, 5, 9]
    for parts in (by_position, by_length):
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        whole = 1 - (returns - values).var(correction=0) / returns.var(correction=0)
        assert total.explained_variance == pytest.approx(float(whole))


def test_share_by_length_when_a_bucket_is_empty_then_nan():
    shares = share_by_length(
        torch.tensor([True, False, True]), torch.tensor([10, 1000, 1001]), [1000, 8000, 9000]
    )
    assert shares[:2] == (0.5, 1.0)
    assert all(math.isnan(share) for share in shares[2:])


def test_calibration_bins_when_values_reach_the_ends_then_all_counted():
    bins = calibration_bins(torch.tensor([-1.5, -1.0, 0.62, 1.0, 1.2]), torch.tensor([0, 0, 1, 1, 0]).bool())
    assert [b.count for b in bins] == [2, 0, 0, 0, 0, 0, 0, 0, 1, 2]
    assert (bins[8].predicted, bins[8].observed, bins[9].observed) == pytest.approx((0.81, 1.0, 0.5))


def test_calibration_by_position_when_values_change_along_the_response_then_bins_of_each_part():
    # Two responses of four tokens and one of one, which is at the beginning of every part.
    values = torch.tensor([0.0, 0.2, 0.6, 1.0, 0.0, -0.2, -0.6, -1.0, 0.5])
    parts = calibration_by_position(
        values, torch.tensor([True, False, True]), torch.tensor([4, 4, 1]), num_parts=4
    )
    counts = [[b.count for b in part] for part in parts]
    assert counts[0] == [0, 0, 0, 0, 0, 2, 0, 1, 0, 0] and parts[0][5].observed == 0.5
    assert counts[3] == [1, 0, 0, 0, 0, 0, 0, 1, 0, 1]
    assert (parts[3][0].observed, parts[3][9].observed, parts[3][9].predicted) == (0.0, 1.0, 1.0)
    assert parts[2][8].predicted == pytest.approx(0.8)


def test_probability_scores_when_ties_exist_then_brier_and_auc():
    probabilities = torch.tensor([0.9, 0.5, 0.5, 0.1])
    correct = torch.tensor([True, True, False, False])
    assert brier_score(probabilities, correct) == pytest.approx((0.01 + 0.25 + 0.25 + 0.01) / 4)
    # Pairs right-wrong: (.9,.5) 1, (.9,.1) 1, (.5,.5) half, (.5,.1) 1.
    assert ranking_quality(probabilities, correct) == pytest.approx(3.5 / 4)
    assert math.isnan(ranking_quality(probabilities, torch.ones(4, dtype=torch.bool)))


def test_agreement_when_critics_differ_by_a_constant_then_correlation_one():
    first = torch.tensor([0.1, 0.5, -0.3, torch.nan], dtype=F64)
    agreement = critic_agreement(first, first - 0.2, torch.tensor([True, True, True, False]))
    assert (agreement.correlation, agreement.mean_difference) == pytest.approx((1.0, 0.2))


def test_confidence_when_nothing_was_measured_then_plain_mean():
    values = torch.tensor([[0.1, -0.9], [0.5, 0.3]], dtype=F64)
    assert torch.allclose(confidence_value(values, initial_calibration(2, 4)), values.mean(0))


def test_confidence_when_one_critic_errs_where_it_predicts_success_then_it_is_believed_less_there():
    # Critic 0 says .9 on responses that fail, and -.9 on others that fail; critic 1 says .5 where the return is .5.
    values = torch.tensor([[0.9, -0.9, 0.9], [0.5, 0.5, 0.5]], dtype=F64)
    returns = torch.tensor([-1.0, -1.0, 0.5], dtype=F64)
    held_out = torch.tensor([[True, True, False], [False, False, True]])
    calibration = update_calibration(initial_calibration(2, 2), values, returns, held_out, rate=1.0)
    assert calibration.errors.tolist() == [pytest.approx([0.01, 3.61]), pytest.approx([1.0, 0.0])]
    value = confidence_value(values, calibration, epsilon=0.01)
    weights = [1 / 3.62, 1 / 0.01]
    assert value[0].item() == pytest.approx((0.9 * weights[0] + 0.5 * weights[1]) / sum(weights))
    weights = [1 / 0.02, 1 / 0.01]
    assert value[1].item() == pytest.approx((-0.9 * weights[0] + 0.5 * weights[1]) / sum(weights))


def test_confidence_when_predictions_leave_the_range_then_end_bins():
    assert prediction_bins(torch.tensor([-9.0, -1.0, 0.0, 1.0, 9.0]), 4).tolist() == [0, 0, 2, 3, 3]


def test_rejection_shares_when_invalid_advantages_are_nan_then_not_counted():
    shares = rejection_shares(
        torch.tensor([True, False, True, False, True]),
        torch.tensor([1.0, 1.0, -1.0, -1.0, torch.nan]),
        torch.tensor([0, 1, 1, 2, 5]),
        torch.tensor([True, True, True, True, False]),
    )
    assert (shares.positive_advantage, shares.negative_advantage) == (0.5, 0.5)
    assert (shares.fresh, shares.stale, shares.stale_negative) == pytest.approx((1.0, 1 / 3, 0.5))


def test_clip_shares_when_sides_differ_then_told_apart():
    loss = ppo_clip(
        torch.tensor([0.5, -0.5, 0.0]), torch.tensor([1.0, -1.0, 1.0]), clip_low=0.2, clip_high=0.2
    )
    shares = clip_shares(loss, torch.ones(3, dtype=torch.bool))
    assert (shares.low, shares.high) == pytest.approx((1 / 3, 1 / 3))


def test_mask_overlaps_when_shares_are_disjoint_then_both_is_zero():
    valid = torch.ones(4, dtype=torch.bool)
    keep_a, keep_h = torch.tensor([False, True, True, True]), torch.tensor([True, True, True, False])
    overlaps = mask_overlaps(keep_a, keep_h, valid)
    assert (overlaps.advantage_masked, overlaps.entropy_filtered) == (0.25, 0.25)
    assert overlaps.both == 0.0


def test_effective_sample_floor_when_nothing_was_measured_then_no_step():
    assert enough_effective_samples(0.3, 0.3)
    assert not enough_effective_samples(0.29, 0.3)
    assert not enough_effective_samples(float("nan"), 0.0)


def test_correlation_when_two_tokens_are_too_few_then_nan():
    valid = torch.tensor([True, True, True, False])
    x = torch.tensor([1.0, 2.0, 3.0, torch.nan])
    assert masked_correlation(x, -2 * x, valid) == pytest.approx(-1.0)
    assert math.isnan(masked_correlation(x, x, x > 2))


def test_value_by_outcome_when_tokens_are_invalid_then_left_out():
    values = torch.tensor([0.5, 0.7, torch.nan, -0.5])
    outcome = value_by_outcome(
        values, torch.tensor([True, False]), torch.tensor([3, 1]), torch.tensor([True, True, False, True])
    )
    assert (outcome.right, outcome.wrong) == pytest.approx((0.6, -0.5))


def test_mean_by_position_when_responses_are_halved_then_mean_of_each_half():
    terms = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0, 20.0])
    assert mean_by_position(terms, torch.tensor([4, 2]), num_parts=2) == pytest.approx((13 / 3, 9.0))


def test_masked_mean_when_the_rest_is_nan_then_not_read():
    assert masked_mean(torch.tensor([1.0, torch.nan, 3.0]), torch.tensor([True, False, True])) == 2.0
