import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyppo_async.algorithms.advantages import whiten
from asyppo_async.algorithms.group_advantages import (
    dr_grpo,
    flash_reinforce,
    grpo,
    mixed_groups,
    overlong_penalty,
    prior_advantages,
    reinforce_plus_plus,
    rloo,
    whiten_groups,
)

F64 = torch.float64
REWARDS = torch.tensor([1, -1, -1, 1, -1], dtype=F64)
ONE_GROUP = torch.zeros(5, dtype=torch.int64)


def test_group_advantages_when_one_group_then_golden(golden, check):
    check(grpo(REWARDS, ONE_GROUP), golden["grpo_unbiased"])
    check(grpo(REWARDS, ONE_GROUP, unbiased=False), golden["grpo_biased"])
    check(dr_grpo(REWARDS, ONE_GROUP), golden["drgrpo"])
    check(rloo(REWARDS, ONE_GROUP), golden["rloo"])
    check(rloo(REWARDS, ONE_GROUP), golden["rloo_direct"])
    check(grpo(torch.ones(4, dtype=F64), ONE_GROUP[:4]), golden["grpo_all_same"])


def slow_group(rewards, ids, function):
    out = []
    for row, draw in enumerate(ids):
        members = [r for r, d in zip(rewards, ids, strict=True) if d == draw]
        out.append(function(rewards[row], members))
    return out


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 3)), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_group_advantages_when_groups_are_interleaved_then_equal_a_loop(rows):
    rewards, ids = [float(r) for r, _ in rows], [d * 1000 - 7 for _, d in rows]
    r, g = torch.tensor(rewards, dtype=F64), torch.tensor(ids)

    def slow_grpo(reward, members):
        if len(members) == 1:
            return 0.0
        return (reward - statistics.mean(members)) / (statistics.stdev(members) + 1e-6)

    def slow_rloo(reward, members):
        others = len(members) - 1
        return reward - (sum(members) - reward) / others if others else 0.0

    expected = torch.tensor(slow_group(rewards, ids, slow_grpo), dtype=F64)
    torch.testing.assert_close(grpo(r, g), expected, rtol=1e-9, atol=1e-9)
    expected = torch.tensor(slow_group(rewards, ids, slow_rloo), dtype=F64)
    torch.testing.assert_close(rloo(r, g), expected, rtol=1e-12, atol=1e-12)


def test_grpo_when_group_is_a_singleton_then_zero_or_the_reward():
    rewards, ids = torch.tensor([1.0, -1.0, 1.0]), torch.tensor([7, 3, 3])
    assert grpo(rewards, ids)[0] == 0.0
    assert grpo(rewards, ids, singleton="reward")[0] == 1.0
    assert rloo(rewards, ids)[0] == 0.0


def test_reinforce_plus_plus_when_lengths_differ_then_token_measure(golden, check):
    rewards, lengths = torch.tensor([1, -1, 1, -1], dtype=F64), torch.tensor([3, 2, 4, 1])
    check(reinforce_plus_plus(rewards, lengths), golden["rpp_token_white"])
    check(reinforce_plus_plus(rewards, lengths, unbiased=True), golden["whiten_verl_unbiased"])
    check(prior_advantages(rewards, torch.zeros(4)), golden["rpp_seq_white"], rtol=1e-8)


def test_reinforce_plus_plus_when_baseline_form_then_group_mean_goes_first():
    rewards, lengths = torch.tensor([1.0, 0.0, 5.0, 5.0], dtype=F64), torch.tensor([1, 1, 2, 1])
    advantages = reinforce_plus_plus(rewards, lengths, group_ids=torch.tensor([0, 0, 1, 1]))
    # Centred: .5, -.5, 0 0, 0; mean 0, variance .1.
    expected = torch.tensor([0.5, -0.5, 0, 0, 0], dtype=F64) / 0.1**0.5
    torch.testing.assert_close(advantages, expected, rtol=1e-6, atol=1e-12)


def test_flash_reinforce_when_batch_is_given_then_minus_its_mean():
    assert flash_reinforce(torch.tensor([1.0, -1.0, 1.0, 1.0])).tolist() == [0.5, -1.5, 0.5, 0.5]
    assert flash_reinforce(torch.ones(0)).tolist() == []


def test_prior_advantages_when_not_normalised_then_reward_minus_value(golden):
    raw = prior_advantages(torch.tensor([1.0]), torch.tensor([0.75]), normalise=False)
    assert raw.item() == golden["spo"]["A"]


def test_mixed_groups_when_counts_run_from_none_to_all_then_only_one_to_k_minus_one_are_kept(golden):
    for right, keep in golden["dapo_keep"].items():
        correct = torch.arange(8) < int(right)
        assert mixed_groups(correct, torch.zeros(8, dtype=torch.int64)).tolist() == [keep] * 8


def test_overlong_penalty_when_length_grows_then_golden(golden, check):
    lengths = torch.tensor([int(n) for n in golden["dapo_overlong"]])
    penalty = overlong_penalty(lengths, max_length=20480, cache=4096)
    check(penalty, list(golden["dapo_overlong"].values()))
    with pytest.raises(ValueError, match="cache must lie"):
        overlong_penalty(lengths, max_length=10, cache=11)


@pytest.mark.parametrize("unbiased", [False, True])
def test_group_whitening_when_groups_are_interleaved_then_each_is_whitened_alone(unbiased):
    generator = torch.Generator().manual_seed(0)
    lengths, groups = torch.tensor([3, 2, 4, 1]), torch.tensor([9, 4, 9, 4])
    advantages = torch.randn(10, generator=generator, dtype=F64)
    advantages[1] = torch.nan
    valid = torch.arange(10) != 1
    result = whiten_groups(advantages, lengths, groups, valid, unbiased=unbiased)
    tokens = groups[torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3])]
    for group in (4, 9):
        members = valid & (tokens == group)
        torch.testing.assert_close(result[members], whiten(advantages[members], unbiased=unbiased))
    assert result[1] == 0
