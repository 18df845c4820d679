"""avg@k and pass@k against counting every subset."""

import math
from itertools import combinations

import pytest

from asyppo_async.trainer.coordinator.accuracy import average, passes

RIGHT = [[True, False, False, True], [False, False, False, False], [True, True, True, True]]


def test_average_is_the_mean_share_with_its_error_over_prompts() -> None:
    estimate = average(RIGHT)
    assert estimate.value == pytest.approx(0.5)
    # shares 1/2, 0, 1: variance 1/4 over two degrees of freedom
    assert estimate.standard_error == pytest.approx(math.sqrt(0.25 / 3))
    assert math.isnan(average(RIGHT[:1]).standard_error)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample() -> None:
    estimates = passes(RIGHT)
    assert list(estimates) == [1, 2, 4]
    for k, estimate in estimates.items():
        shares = [sum(map(any, combinations(row, k))) / math.comb(4, k) for row in RIGHT]
        assert estimate.value == pytest.approx(sum(shares) / 3)
    assert estimates[1].value == pytest.approx(0.5) and estimates[4].value == pytest.approx(2 / 3)


def test_pass_at_k_when_prompts_have_unequal_samples_goes_as_far_as_the_fewest() -> None:
    assert list(passes([[True], [False, True, True]])) == [1]
