import math

import numpy as np
import pytest

from asyppo_async.weights.probe import compare, fixed_sequences


def test_fixed_sequences_when_there_is_room_then_they_cross_a_block_boundary_and_repeat_exactly() -> None:
    sequences = fixed_sequences(3, vocab_size=11, kv_block_tokens=128, max_len=4096)
    assert [len(sequence) for sequence in sequences] == [2, 17, 129]
    assert all(sequence.dtype == np.int32 for sequence in sequences)
    assert all(sequence.min() >= 0 and sequence.max() < 11 for sequence in sequences)
    again = fixed_sequences(3, vocab_size=11, kv_block_tokens=128, max_len=4096)
    assert all(np.array_equal(one, two) for one, two in zip(sequences, again, strict=True))


@pytest.mark.parametrize(("max_len", "lengths"), [(64, [2, 17, 64]), (17, [2, 17]), (2, [2])])
def test_fixed_sequences_when_the_model_is_short_then_they_are_cut_and_not_repeated(
    max_len: int, lengths: list[int]
) -> None:
    sequences = fixed_sequences(0, vocab_size=5, kv_block_tokens=128, max_len=max_len)
    assert [len(sequence) for sequence in sequences] == lengths


def test_compare_when_sides_differ_then_mean_and_max_are_of_the_absolute_gap() -> None:
    gap = compare(np.array([-1.0, -2.0, -3.0], np.float32), np.array([-1.5, -2.0, -2.0], np.float32))
    assert (gap.mean, gap.max, gap.num_tokens) == (0.5, 1.0, 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_compare_when_a_log_prob_is_not_finite_then_the_gap_is_infinite(bad: float) -> None:
    good, broken = np.array([-1.0, -2.0], np.float32), np.array([-1.0, bad], np.float32)
    assert compare(good, broken).mean == math.inf
    assert compare(broken, good).max == math.inf
    assert compare(broken, broken).mean == math.inf


def test_compare_when_the_sides_scored_different_tokens_then_it_is_refused() -> None:
    with pytest.raises(ValueError, match="different tokens"):
        compare(np.zeros(2, np.float32), np.zeros(3, np.float32))
