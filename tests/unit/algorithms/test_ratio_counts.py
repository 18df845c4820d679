"""Percentiles from counts: near those of the tokens themselves, and the same however the tokens are cut."""

import math

import numpy as np
import pytest
import torch

from asyppo_async.algorithms.ratio_counts import NUM_BINS, count_log_ratios, no_counts, ratio_quantile


@pytest.mark.parametrize("spread", [1e-4, 0.02, 0.5, 4.0])
@pytest.mark.parametrize("at", [0.0, 0.01, 0.5, 0.99, 1.0])
def test_quantile_when_tokens_are_many_then_within_a_percent_of_the_logarithm(
    spread: float, at: float
) -> None:
    logs = np.random.default_rng(3).normal(0, spread, 4001)
    got = ratio_quantile(count_log_ratios(torch.from_numpy(logs)), at)
    assert math.log(got) == pytest.approx(math.log(np.quantile(np.exp(logs), at)), rel=0.009, abs=2e-6)


def test_quantile_when_it_lies_between_two_tokens_then_interpolated() -> None:
    got = ratio_quantile(count_log_ratios(torch.tensor([0.0, math.log(2.0)])), 0.25)
    assert got == pytest.approx(1.25, rel=0.005)


def test_counts_when_tokens_are_cut_into_parts_then_they_add_to_those_of_the_whole() -> None:
    logs = torch.randn(301, generator=torch.Generator().manual_seed(0))
    parts = sum((count_log_ratios(part) for part in logs.split([100, 0, 201])), no_counts())
    assert torch.equal(parts, count_log_ratios(logs)) and int(parts.sum()) == 301


def test_counts_when_logs_are_zero_tiny_or_beyond_the_limit_then_in_the_middle_and_end_bins() -> None:
    counts = count_log_ratios(torch.tensor([0.0, -0.0, 9e-7, -9e-7, 25.0, -25.0, 20.0]))
    assert (int(counts[NUM_BINS // 2]), int(counts[0]), int(counts[-1])) == (4, 1, 2)
    assert ratio_quantile(counts, 0.5) == 1.0


def test_quantile_when_there_is_no_token_then_nan() -> None:
    assert math.isnan(ratio_quantile(no_counts(), 0.99))
