"""The step's arithmetic does not depend on order, padding, micro-batches, ranks or dtype."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyppo_async.algorithms.advantages import gae, length_adaptive_lambda
from asyppo_async.algorithms.aggregation import MODES, aggregate, denominator, token_weights
from asyppo_async.algorithms.composition import entropy_coefficients, policy_coefficients
from asyppo_async.algorithms.critics import ensemble_value, value_std, value_std_masks
from asyppo_async.algorithms.losses import entropy_bonus, policy_log_ratio, ppo_clip
from asyppo_async.algorithms.mismatch import SequenceGate, TokenRule, correct_mismatch
from asyppo_async.algorithms.packed import neutralise
from asyppo_async.algorithms.token_classes import classify_tokens, token_masks

F64 = torch.float64
LENGTHS = [5, 1, 0, 7, 3, 12, 2, 4]
GATES = [SequenceGate(kind="max_log_ratio", high=1.2)]


@dataclass(frozen=True)
class Batch:
    lengths: Tensor
    rewards: Tensor
    values: Tensor
    behaviour: Tensor
    proximal: Tensor
    policy: Tensor
    entropies: Tensor
    valid: Tensor


def make_batch(seed, dtype=F64):
    generator = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    behaviour = -torch.rand(total, generator=generator, dtype=F64) * 2
    proximal = behaviour + 0.4 * torch.randn(total, generator=generator, dtype=F64)
    policy = proximal + 0.2 * torch.randn(total, generator=generator, dtype=F64)
    rewards = torch.randint(0, 2, (len(LENGTHS),), generator=generator).to(F64) * 2 - 1
    values = torch.randn(2, total, generator=generator, dtype=F64)
    entropies = torch.rand(total, generator=generator, dtype=F64)
    columns = [x.to(dtype) for x in (rewards, values, behaviour, proximal, policy, entropies)]
    return Batch(torch.tensor(LENGTHS), *columns, torch.ones(total, dtype=torch.bool))


def rearranged(batch, order, padding):
    """Responses in another order, each followed by invalid tokens that hold garbage."""

    def move(column, fill):
        parts = column.split(batch.lengths.tolist(), dim=-1)
        pad = torch.full((*column.shape[:-1], padding), fill, dtype=column.dtype)
        return torch.cat([torch.cat([parts[i], pad], -1) for i in order], -1)

    columns = (batch.behaviour, batch.proximal, batch.policy, batch.entropies)
    moved = [move(column, torch.nan) for column in columns]
    return Batch(
        batch.lengths[order] + padding,
        batch.rewards[order],
        move(batch.values, torch.nan),
        *moved,
        move(batch.valid, False),
    )


def coordinator(batch):
    """Per token: advantage, coefficient of the policy term, coefficient of the entropy term; and the classes' masks."""
    rule = TokenRule(kind="icepop", low=0.5, high=5.0)
    correction = correct_mismatch(
        batch.proximal, batch.behaviour, batch.lengths, rule=rule, gates=GATES, valid=batch.valid
    )
    classes = classify_tokens(
        batch.lengths,
        valid=batch.valid,
        keep_sequences=correction.keep_sequences,
        keep_tokens=correction.keep_tokens,
    )
    masks = token_masks(classes)
    selection = value_std_masks(
        value_std(batch.values), advantage_share=0.2, entropy_share=0.2, valid=masks.ranking
    )
    values = ensemble_value(batch.values)
    lambdas = length_adaptive_lambda(
        torch.stack([part.sum() for part in batch.valid.split(batch.lengths.tolist())]), 1.5
    )
    advantages = gae(batch.rewards, values, batch.lengths, lambdas, action_mask=batch.valid)
    policy = policy_coefficients(masks, correction.weights, selection.advantage_keep)
    return advantages, policy, entropy_coefficients(masks, selection.entropy_keep), masks


def worker(batch, rows, advantages, policy_coefficient, entropy_coefficient, counted, mode, total):
    """Loss and gradient of some responses, given everything the coordinator sends."""
    starts = batch.lengths.cumsum(0) - batch.lengths
    index = torch.cat([torch.arange(int(starts[i]), int(starts[i] + batch.lengths[i])) for i in rows])
    lengths = batch.lengths[rows]
    policy = batch.policy[index].clone().requires_grad_()
    keep = policy_coefficient[index] != 0
    logs = policy_log_ratio(policy, batch.proximal[index], keep)
    terms = ppo_clip(logs, neutralise(advantages[index], keep), clip_low=0.2, clip_high=0.2).terms
    bonus = entropy_bonus(batch.entropies[index], 0.01)
    weights = token_weights(mode, lengths, counted[index], dtype=policy.dtype)
    loss = aggregate(terms, weights * policy_coefficient[index], total)
    loss = loss + aggregate(bonus, weights * entropy_coefficient[index], total)
    loss.backward()
    return loss.detach(), index, policy.grad


def step(batch, mode, parts):
    advantages, policy, entropy, masks = coordinator(batch)
    total = denominator(mode, batch.lengths, masks.denominator, max_length=12)
    gradient = torch.zeros_like(batch.policy)
    loss = torch.zeros((), dtype=batch.policy.dtype)
    for rows in parts:
        value, index, grad = worker(batch, rows, advantages, policy, entropy, masks.denominator, mode, total)
        loss, gradient[index] = loss + value, grad
    return loss, gradient


WHOLE = [list(range(8))]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shards", [2, 4, 8])
def test_step_when_cut_over_ranks_or_micro_batches_then_same_loss_and_gradient(mode, shards):
    batch = make_batch(0)
    loss, gradient = step(batch, mode, WHOLE)
    assert float(gradient.abs().sum()) > 0
    for parts in (
        [list(range(rank, 8, shards)) for rank in range(shards)],
        [list(range(8))[i : i + 8 // shards] for i in range(0, 8, 8 // shards)],
    ):
        cut_loss, cut_gradient = step(batch, mode, parts)
        torch.testing.assert_close(cut_loss, loss, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(cut_gradient, gradient, rtol=1e-12, atol=1e-15)


@given(st.permutations(range(8)), st.integers(0, 2), st.sampled_from(MODES), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_step_when_responses_are_permuted_and_padded_with_nan_then_same_loss_and_gradient(
    order, padding, mode, seed
):
    batch = make_batch(seed)
    loss, gradient = step(batch, mode, WHOLE)
    other = rearranged(batch, list(order), padding)
    other_loss, other_gradient = step(other, mode, WHOLE)
    torch.testing.assert_close(other_loss, loss, rtol=1e-11, atol=1e-14)
    back = dict(zip(order, other_gradient.split(other.lengths.tolist()), strict=True))
    restored = torch.cat([back[i][: LENGTHS[i]] for i in range(8)])
    torch.testing.assert_close(restored, gradient, rtol=1e-11, atol=1e-14)
    for i in range(8):
        assert back[i][LENGTHS[i] :].tolist() == [0.0] * padding


def test_step_when_float32_then_close_to_float64():
    loss, gradient = step(make_batch(3), "token-mean", WHOLE)
    single_loss, single_gradient = step(make_batch(3, torch.float32), "token-mean", WHOLE)
    assert single_gradient.dtype == torch.float32
    torch.testing.assert_close(single_loss.double(), loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(single_gradient.double(), gradient, rtol=1e-4, atol=1e-6)


def test_masks_when_critics_vote_then_same_tokens_whatever_the_order_and_padding():
    batch = make_batch(1)
    masks = value_std_masks(value_std(batch.values), advantage_share=0.3, entropy_share=0.2)
    assert (masks.num_advantage_masked, masks.num_entropy_filtered) == (10, 6)
    order = [3, 1, 7, 0, 2, 6, 5, 4]
    other = rearranged(batch, order, 2)
    again = value_std_masks(
        value_std(other.values), advantage_share=0.3, entropy_share=0.2, valid=other.valid
    )
    parts = dict(zip(order, again.advantage_keep.split(other.lengths.tolist()), strict=True))
    restored = torch.cat([parts[i][: LENGTHS[i]] for i in range(8)])
    assert torch.equal(restored, masks.advantage_keep)
