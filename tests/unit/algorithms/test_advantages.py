import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyppo_async.algorithms.advantages import gae, length_adaptive_lambda, value_targets, whiten

F64 = torch.float64
VALUES = torch.tensor([0.1, 0.2, -0.1, 0.3, 0.5], dtype=F64)
FIVE = torch.tensor([5])


def slow_gae(rewards, values, lengths, lambdas, gamma=1.0, ends=None):
    """Straight from the definition: sum over l of (gamma lambda)^l delta_{t+l}."""
    out, start = [], 0
    for row, length in enumerate(lengths):
        v = [float(x) for x in values[start : start + length]] + [0.0 if ends is None else float(ends[row])]
        r = [0.0] * (length - 1) + [float(rewards[row])]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(length)]
        decay = gamma * float(lambdas[row])
        out += [sum(decay ** (k - t) * delta[k] for k in range(t, length)) for t in range(length)]
        start += length
    return torch.tensor(out, dtype=F64)


@pytest.mark.report("P60")
@pytest.mark.parametrize(
    ("reward", "lambda_", "key"),
    [(1, 1.0, "gae_lam1"), (1, 0.95, "gae_lam095"), (1, 0.0, "gae_lam0"), (-1, 1.0, "gae_lam1_neg")],
)
def test_gae_when_reward_is_terminal_then_golden(reward, lambda_, key, golden, check):
    rewards = torch.tensor([reward], dtype=F64)
    check(gae(rewards, VALUES, FIVE, lambda_), golden[key])
    check(gae(rewards, VALUES, FIVE, torch.tensor([lambda_], dtype=F64)), golden[key])


def test_gae_when_state_after_the_end_had_a_value_then_it_is_not_used(golden):
    advantages = gae(torch.tensor([1.0], dtype=F64), VALUES, FIVE, 1.0)
    wrong = torch.tensor(golden["pitfall_v_after_eos"], dtype=F64)
    torch.testing.assert_close(wrong - advantages, torch.full((5,), 0.4, dtype=F64))


def test_gae_when_lambda_below_one_then_equals_the_lambda_return_minus_value(golden):
    lam, length, reward = 0.95, 5, 1.0
    expected = []
    for t in range(length):
        steps = [float(VALUES[t + n]) for n in range(1, length - t)]
        mix = (1 - lam) * sum(lam**n * value for n, value in enumerate(steps))
        expected.append(mix + lam ** (length - t - 1) * reward - float(VALUES[t]))
    advantages = gae(torch.tensor([reward], dtype=F64), VALUES, FIVE, lam)
    error = float((advantages - torch.tensor(expected, dtype=F64)).abs().max())
    # As exact as the independent program, but for the order of its sums.
    assert error <= 4 * golden["lambda_return_identity_maxerr"]


def weight_of_the_end(length, lambda_):
    """[T] what a reward at the end is worth at each token to critics that know nothing."""
    return gae(torch.ones(1, dtype=F64), torch.zeros(length, dtype=F64), torch.tensor([length]), lambda_)


def test_gae_when_lambda_is_fixed_then_the_end_fades_with_the_distance(golden, check):
    weights = weight_of_the_end(501, 0.95)
    check(weights[500 - 100], golden["decay_095_100"])
    check(weights[[500 - k for k in (10, 50, 90, 500)]], golden["decay_095_T"], atol=0.0)


@pytest.mark.parametrize(
    ("alpha", "key"), [(1.5, "weight_first_token_alpha1.5"), (0.05, "weight_first_token_alpha0.05")]
)
def test_gae_when_lambda_adapts_then_the_first_token_sees_the_end_at_any_length(alpha, key, golden, check):
    for length, weight in golden[key].items():
        lambdas = length_adaptive_lambda(torch.tensor([int(length)]), alpha)
        check(weight_of_the_end(int(length), lambdas)[0], weight, atol=0.0)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 10**6), st.sampled_from([0.9, 1.0])
)
@settings(max_examples=40, deadline=None)
def test_gae_when_packed_then_equals_the_slow_sum(lengths, seed, gamma):
    generator = torch.Generator().manual_seed(seed)
    n = len(lengths)
    values = torch.randn(sum(lengths), generator=generator, dtype=F64)
    rewards, lambdas, ends = (torch.rand(n, generator=generator, dtype=F64) for _ in range(3))
    packed = gae(rewards, values, torch.tensor(lengths), lambdas, gamma=gamma, bootstrap_values=ends)
    torch.testing.assert_close(packed, slow_gae(rewards, values, lengths, lambdas, gamma, ends))
    one = gae(rewards, values, torch.tensor(lengths), 1.0, gamma=gamma)
    torch.testing.assert_close(one, slow_gae(rewards, values, lengths, [1.0] * n, gamma))


@given(st.permutations(range(5)), st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_gae_when_responses_are_permuted_then_advantages_are_permuted(order, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([3, 0, 7, 1, 4])
    values = list(torch.randn(15, generator=generator, dtype=F64).split(lengths.tolist()))
    rewards = torch.randn(5, generator=generator, dtype=F64)
    straight = gae(rewards, torch.cat(values), lengths, 0.9).split(lengths.tolist())
    permuted = gae(rewards[list(order)], torch.cat([values[i] for i in order]), lengths[list(order)], 0.9)
    assert torch.equal(permuted, torch.cat([straight[i] for i in order]))


@pytest.mark.report("P60")
def test_gae_when_observation_tokens_hold_nan_then_action_tokens_are_chained(golden, check):
    mask = torch.tensor([True, True, False, False, True, True])
    values = torch.tensor([0.1, 0.2, torch.nan, torch.inf, 0.4, 0.6], dtype=F64)
    advantages = gae(torch.tensor([1.0], dtype=F64), values, torch.tensor([6]), 0.9, action_mask=mask)
    check(advantages[mask], golden["skip_obs_gae_lam0.9"])
    assert torch.equal(advantages[~mask], torch.zeros(2, dtype=F64))
    targets = value_targets(torch.tensor([1.0], dtype=F64), values, torch.tensor([6]), 0.9, action_mask=mask)
    check(targets[mask], [0.8336, 0.904, 0.96, 1.0])
    assert torch.equal(targets[~mask], torch.zeros(2, dtype=F64))
    read = torch.where(mask, values, 9.0)
    check(gae(torch.ones(1, dtype=F64), read, torch.tensor([6]), 0.9)[mask], golden["naive_obs_gae_lam0.9"])


@pytest.mark.parametrize(("lambda_", "key"), [(1.0, "target_mc"), (0.95, "target_lam095")])
def test_value_targets_when_critic_lambda_is_its_own_then_golden(lambda_, key, golden, check):
    check(value_targets(torch.tensor([1.0], dtype=F64), VALUES, FIVE, lambda_), golden[key])


def test_value_targets_when_monte_carlo_then_values_are_never_read():
    targets = value_targets(torch.tensor([-1.0]), torch.full((3,), torch.nan), torch.tensor([3]), 1.0)
    assert targets.tolist() == [-1.0, -1.0, -1.0]


@pytest.mark.parametrize(("alpha", "key"), [(1.5, "lamlen_1.5"), (0.05, "lamlen_0.05")])
def test_length_adaptive_lambda_when_length_varies_then_golden(alpha, key, golden, check):
    lengths = torch.tensor([int(length) for length in golden[key]])
    check(length_adaptive_lambda(lengths, alpha), list(golden[key].values()))
    assert length_adaptive_lambda(torch.tensor([0]), alpha).tolist() == [0.0]


def test_gae_when_lambda_depends_on_length_then_golden(golden, check):
    lambdas = length_adaptive_lambda(torch.tensor([5, 4, 4]), 1.5)
    values = torch.cat([VALUES, torch.tensor([0.6, 0.7, 0.8, 0.9, 0.6, 0.6, 0.2, -0.4], dtype=F64)])
    advantages = gae(torch.tensor([1.0, 1.0, -1.0], dtype=F64), values, torch.tensor([5, 4, 4]), lambdas)
    check(advantages[:5], golden["gae_lenadaptive_T5_a1.5"])
    check(advantages[5:9], golden["s3ac_gae_R+1_T4"])
    check(advantages[9:], golden["s3ac_gae_R-1_T4"])


def test_gae_when_values_are_float32_then_result_is_float32_and_close():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3000, generator=generator, dtype=F64)
    rewards, lengths = torch.tensor([1.0, -1.0], dtype=F64), torch.tensor([2000, 1000])
    single = gae(rewards.float(), values.float(), lengths, 0.99)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), gae(rewards, values, lengths, 0.99), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("unbiased", "key"), [(False, "rpp_token_white"), (True, "whiten_verl_unbiased")])
def test_whiten_when_invalid_tokens_hold_nan_then_golden_over_valid_ones(unbiased, key, golden, check):
    advantages = torch.tensor([1, 1, 1, -1, -1, 1, 1, 1, 1, -1, torch.nan], dtype=F64)
    valid = torch.tensor([True] * 10 + [False])
    whitened = whiten(advantages, valid, unbiased=unbiased)
    check(whitened[:10], golden[key])
    assert whitened[10] == 0


def test_gae_when_lengths_do_not_match_then_says_so():
    with pytest.raises(ValueError, match="sum to 4 but the packed tensor holds 5"):
        gae(torch.ones(1), VALUES, torch.tensor([4]), 1.0)


@pytest.mark.parametrize("gamma", [1.0, 0.97])
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_gae_when_responses_are_longer_than_a_block_then_the_plain_recurrence_bit_for_bit(gamma, dtype):
    lengths = torch.tensor([0, 1, 63, 64, 65, 200, 128, 130, 2])
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(int(lengths.sum()), generator=generator, dtype=F64).to(dtype)
    rewards, ends = torch.randn(2, len(lengths), generator=generator, dtype=F64)
    lambdas = length_adaptive_lambda(lengths, 1.5)
    expected = []
    for i, part in enumerate(values.double().split(lengths.tolist())):
        advantage, following, backwards = 0.0, float(ends[i]), []
        for step, here in enumerate(reversed(part.tolist())):
            delta = gamma * following - here
            if step == 0:
                delta += float(rewards[i])
            advantage = delta + gamma * float(lambdas[i]) * advantage
            following = here
            backwards.append(advantage)
        expected += reversed(backwards)
    got = gae(rewards, values, lengths, lambdas, gamma=gamma, bootstrap_values=ends)
    assert torch.equal(got, torch.tensor(expected, dtype=F64).to(dtype))
