import math

import pytest
import torch

from asyppo_async.algorithms.critics import value_std
from asyppo_async.algorithms.metrics import (
    chi_square,
    effective_sample_size,
    explained_variance,
    explained_variance_sums,
    kl_k1,
    kl_k2,
    kl_k3,
    perplexity_ratio,
    ratio_statistics,
    staleness_statistics,
    value_std_quantiles,
)

F64 = torch.float64
RETURNS = torch.tensor([1, 1, -1, -1, 1, -1], dtype=F64)
GOOD = torch.tensor([0.6, 0.2, -0.4, 0.1, 0.5, -0.7], dtype=F64)
BAD = torch.tensor([-0.6, 0.9, 0.8, -0.2, -0.9, 0.7], dtype=F64)


def test_ratio_metrics_when_worked_batch_then_golden(golden, check):
    logs = torch.tensor(golden["w"], dtype=F64).log()
    dirty = torch.cat([logs, torch.tensor([torch.nan], dtype=F64)])
    valid = torch.tensor([True] * 7 + [False])
    check(effective_sample_size(dirty, valid), golden["ess"])
    check(effective_sample_size(dirty, valid), golden["ess_form2"])
    check(chi_square(dirty, valid), golden["chi2"])
    check(kl_k1(dirty, valid), golden["k1_mu_old"])
    check(kl_k2(dirty, valid), golden["k2"])
    check(kl_k3(dirty, valid), golden["k3_mu_old"])
    check(perplexity_ratio(dirty, valid), golden["ppl_ratio"])


def test_ratio_statistics_when_a_log_is_not_finite_then_left_out(golden):
    logs = torch.tensor([*golden["w"], 1.0], dtype=F64).log()
    logs[-1] = torch.inf
    statistics = ratio_statistics(logs)
    assert statistics.num_tokens == 7
    assert statistics.effective_sample_size == pytest.approx(golden["ess"])
    assert (statistics.minimum, statistics.maximum) == pytest.approx((min(golden["w"]), max(golden["w"])))


def test_kl_estimators_when_averaged_exactly_then_both_equal_the_kl(golden, check):
    mu = torch.tensor([0.5, 0.3, 0.2], dtype=F64)
    pi = torch.tensor([0.4, 0.4, 0.2], dtype=F64)
    logs = (pi / mu).log()
    # Ten draws in the proportions of mu make the sample mean the expectation.
    sample = torch.repeat_interleave(logs, torch.tensor([5, 3, 2]))
    for expected in ("kl_exact_mu_pi", "E_k1", "E_k3"):
        check(kl_k1(sample), golden[expected])
        check(kl_k3(sample), golden[expected])
    check(kl_k2(sample), golden["E_k2"])


def test_explained_variance_when_values_are_good_or_bad_then_golden(golden, check):
    check(explained_variance(RETURNS, GOOD), golden["ev_good"])
    check(explained_variance(RETURNS, BAD), golden["ev_bad"])
    check(explained_variance(RETURNS, GOOD + 3), golden["ev_const_shift"])
    check(explained_variance(RETURNS, RETURNS * 0), golden["ev_zero_value"])
    assert explained_variance_sums(RETURNS, GOOD + 3).bias == pytest.approx(
        float((RETURNS - GOOD).mean()) - 3
    )


def test_explained_variance_when_returns_do_not_vary_then_nan(golden, check):
    check(explained_variance(torch.ones(4, dtype=F64), GOOD[:4]), golden["ev_const_return"])
    assert math.isnan(explained_variance(torch.full((4,), 0.1), torch.randn(4)))
    assert math.isnan(explained_variance(torch.ones(0), torch.ones(0)))


def test_explained_variance_when_sums_of_shards_are_added_then_the_global_value(golden, check):
    halves = [explained_variance_sums(RETURNS[s], GOOD[s]) for s in (slice(0, 3), slice(3, 6))]
    whole, mean_of_shards = golden["ev_two_shards_vs_mean_of_shards"]
    check((halves[0] + halves[1]).explained_variance, whole)
    check(explained_variance_sums(RETURNS, GOOD).explained_variance, golden["ev_suffstat"])
    check((halves[0].explained_variance + halves[1].explained_variance) / 2, mean_of_shards)


def test_value_std_quantiles_when_worked_batch_then_golden(golden, check):
    v1 = [0.10, 0.30, 0.60, -0.2, -0.5, 0.0, 0.2, 0.4, 0.7, -0.1]
    v2 = [0.20, 0.26, 0.10, -0.6, -0.52, 0.3, 0.25, 0.96, 0.58, 0.7]
    check(value_std_quantiles(value_std(torch.tensor([v1, v2], dtype=F64))), golden["value_std_quantiles"])


def test_staleness_when_a_token_is_from_the_future_then_raises():
    with pytest.raises(ValueError, match="version 8 is newer than trainer 7"):
        staleness_statistics(torch.tensor([8]), torch.tensor([1]), 7)


def test_staleness_when_padding_is_invalid_then_not_counted():
    versions = torch.tensor([7, 0, 5, 5])
    valid = torch.tensor([True, False, True, True])
    statistics = staleness_statistics(versions, torch.tensor([2, 2]), 7, valid)
    assert statistics.token_histogram == (1, 0, 2)
    assert statistics.sequence_histogram == (1, 0, 1)
    assert statistics.mixed_share == 0.0
