import math

import pytest
import torch

from asyppo_async.algorithms.advantages import gae
from asyppo_async.algorithms.evpo import gated_advantages
from asyppo_async.algorithms.truncation import episode_ends

F64 = torch.float64
VALUES = torch.tensor([0.1, 0.2, -0.1, 0.3], dtype=F64)
LENGTHS = torch.tensor([4])
CUT = torch.tensor([True])


def advantages(rule, **more):
    ends = episode_ends(torch.tensor([1.0], dtype=F64), VALUES, LENGTHS, CUT, rule, **more)
    return ends, gae(ends.rewards, VALUES, LENGTHS, 0.95, bootstrap_values=ends.bootstrap_values)


@pytest.mark.report("P60")
def test_egae_when_response_is_cut_then_golden(golden, check):
    ends, result = advantages("egae")
    check(result, golden["egae_trunc_lam095"])
    assert ends.critic_trains.tolist() == [False]


def test_cut_when_treated_as_an_end_without_reward_then_it_is_the_wrong_number(golden, check):
    result = gae(torch.zeros(1, dtype=F64), VALUES, LENGTHS, 0.95)
    check(result, golden["wrong_trunc_v0"])


def test_finished_when_response_hit_the_limit_then_minus_one_and_no_bootstrap():
    ends, result = advantages("finished")
    assert ends.rewards.tolist() == [-1.0] and ends.bootstrap_values.tolist() == [0.0]
    assert result[-1] == pytest.approx(-1.3)
    assert ends.critic_trains.tolist() == [True]


def test_bootstrap_when_last_value_is_given_then_no_reward_and_that_value():
    ends, result = advantages("bootstrap", last_values=torch.tensor([0.9], dtype=F64))
    assert ends.rewards.tolist() == [0.0]
    assert result[-1] == pytest.approx(0.9 - 0.3)


def test_egae_when_last_tokens_are_observations_then_value_of_the_last_action():
    mask = torch.tensor([True, True, False, False])
    values = torch.tensor([0.1, 0.2, torch.nan, torch.nan], dtype=F64)
    ends = episode_ends(torch.zeros(1, dtype=F64), values, LENGTHS, CUT, "egae", action_mask=mask)
    assert ends.bootstrap_values.tolist() == [0.2]


def test_ends_when_response_is_empty_or_finished_then_untouched():
    ends = episode_ends(
        torch.tensor([1.0, -0.5]), VALUES.float(), torch.tensor([0, 4]), torch.tensor([True, False]), "egae"
    )
    assert ends.bootstrap_values.tolist() == [0.0, 0.0]
    assert ends.rewards.tolist() == [0.0, -0.5]


RETURNS = torch.tensor([1, 1, -1, -1, 1, -1], dtype=F64)
GOOD = torch.tensor([0.6, 0.2, -0.4, 0.1, 0.5, -0.7], dtype=F64)
BAD = torch.tensor([-0.6, 0.9, 0.8, -0.2, -0.9, 0.7], dtype=F64)
SIX = torch.tensor([2, 4])


def test_gate_when_critic_explains_then_value_is_the_baseline_else_the_mean(golden, check):
    good, bad = gated_advantages(RETURNS, GOOD, SIX), gated_advantages(RETURNS, BAD, SIX)
    check(good.advantages, golden["evpo_adv_good"])
    check(bad.advantages, golden["evpo_adv_bad"])
    assert (good.used_critic, bad.used_critic) == (True, False)


def test_gate_when_returns_do_not_vary_then_nan_and_the_mean():
    result = gated_advantages(torch.ones(4, dtype=F64), GOOD[:4], torch.tensor([4]))
    assert math.isnan(result.explained_variance) and not result.used_critic
    assert result.advantages.tolist() == [0.0] * 4


def test_gate_when_baseline_is_per_group_and_invalid_tokens_hold_nan_then_group_means():
    returns = torch.tensor([1.0, 1.0, torch.nan, 0.0, -1.0], dtype=F64)
    valid = torch.tensor([True, True, False, True, True])
    lengths, groups = torch.tensor([1, 2, 1, 1]), torch.tensor([5, 9, 5, 9])
    values = torch.tensor([-1.0, -1.0, torch.nan, 1.0, 1.0], dtype=F64)
    result = gated_advantages(returns, values, lengths, valid=valid, group_ids=groups)
    assert not result.used_critic
    assert result.advantages.tolist() == [0.5, 1.0, 0.0, -0.5, -1.0]
