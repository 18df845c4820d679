"""The step's arithmetic does not depend on order, padding, micro-batches, ranks, masked positions or dtype."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyppo_async.algorithms.aggregation import MODES
from asyppo_async.algorithms.critics import value_std, value_std_masks
from asyppo_async.algorithms.policy_losses import BoundsKind, LossKind, PolicyLoss
from tests.unit.algorithms.whole_step import (
    LENGTHS,
    Method,
    decide,
    make_batch,
    rearranged,
    spoiled,
    step,
    sum_of_parts,
    with_masked_responses,
)

METHODS = {
    "ppo": Method(),
    "decoupled ppo": Method(rule="importance"),
    "a3po": Method(reference="a3po", rule="none"),
    "dual clip": Method(loss=PolicyLoss(dual_clip=1.1)),
    "clip-higher": Method(clip_high=0.28),
    "cispo relative": Method(loss=PolicyLoss(kind="cispo")),
    "cispo upper": Method(loss=PolicyLoss(kind="cispo", bounds="upper_only")),
    "cispo absolute": Method(loss=PolicyLoss(kind="cispo", bounds="absolute"), clip_high=1.1),
    "cispo unified mask": Method(loss=PolicyLoss(kind="cispo", unified_mask=True)),
    "dis": Method(loss=PolicyLoss(kind="dis"), reference="behaviour"),
    "gspo": Method(loss=PolicyLoss(kind="gspo"), clip_low=0.03, clip_high=0.03, advantage_per_response=True),
    "gspo-token": Method(loss=PolicyLoss(kind="gspo_token"), clip_low=0.03, clip_high=0.03),
    "aspo": Method(loss=PolicyLoss(kind="aspo", dual_clip=1.2)),
    "topr": Method(loss=PolicyLoss(kind="topr"), reference="behaviour"),
    "topr sequence": Method(loss=PolicyLoss(kind="topr", level="sequence"), reference="behaviour"),
    "m2po": Method(m2po="trust_region"),
    "m2po of all": Method(m2po="all"),
    "dppo": Method(loss=PolicyLoss(kind="dppo"), clip_low=0.1, clip_high=0.1, reference="behaviour"),
    "opsm": Method(opsm_threshold=0.1),
    "gepo entropy": Method(group_entropy_scaling=True),
    "gepo expectation": Method(
        loss=PolicyLoss(kind="gepo_expectation"), reference="group_expectation", advantage_per_response=True
    ),
    "gepo product": Method(
        loss=PolicyLoss(kind="gepo_expectation", length_normalised=False),
        reference="group_expectation",
        advantage_per_response=True,
    ),
    "reinforce": Method(loss=PolicyLoss(kind="reinforce"), rule="icepop"),
}
PPO = METHODS["ppo"]
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
few = settings(max_examples=8, deadline=None)

lengths_of_responses = st.lists(st.integers(0, 6), min_size=1, max_size=6)
seeds = st.integers(0, 10**6)
modes = st.sampled_from(MODES)
garbage = st.sampled_from([torch.nan, torch.inf, -torch.inf])


def test_methods_are_all_that_there_are_and_no_two_are_alike():
    losses = [method.loss for method in METHODS.values()]
    assert {loss.kind for loss in losses} == set(get_args(LossKind))
    assert {loss.bounds for loss in losses} == set(get_args(BoundsKind))
    batch = make_batch(1)
    gradients = [step(batch, method, "token-mean")[1] for method in METHODS.values()]
    assert len({tuple(gradient.tolist()) for gradient in gradients}) == len(METHODS)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shards", [2, 4, 8])
def test_step_when_cut_over_ranks_or_micro_batches_then_same_loss_and_gradient(mode, shards):
    batch = make_batch(0)
    loss, gradient = step(batch, PPO, mode)
    assert float(gradient.abs().sum()) > 0
    for parts in (
        [list(range(rank, 8, shards)) for rank in range(shards)],
        [list(range(8))[i : i + 8 // shards] for i in range(0, 8, 8 // shards)],
    ):
        cut_loss, cut_gradient = step(batch, PPO, mode, parts)
        torch.testing.assert_close(cut_loss, loss, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(cut_gradient, gradient, rtol=1e-12, atol=1e-15)


@every_method
@given(lengths=lengths_of_responses, holes=st.integers(0, 3), mode=modes, seed=seeds, data=st.data())
@few
def test_loss_when_cut_anyhow_then_parts_add_up_under_global_denominators(
    method, lengths, holes, mode, seed, data
):
    batch = make_batch(seed, lengths=lengths, num_holes=holes)
    rows = range(len(lengths))
    owners = data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    loss, gradient = step(batch, method, mode)
    parts = [[row for row in rows if owners[row] == owner] for owner in range(4)]
    cut_loss, cut_gradient = step(batch, method, mode, parts)
    torch.testing.assert_close(cut_loss, loss, rtol=1e-11, atol=1e-14)
    torch.testing.assert_close(cut_gradient, gradient, rtol=1e-11, atol=1e-14)


@given(st.permutations(range(8)), st.integers(0, 2), modes, seeds)
@settings(max_examples=40, deadline=None)
def test_step_when_responses_are_permuted_and_padded_with_nan_then_same_loss_and_gradient(
    order, padding, mode, seed
):
    unchanged_when_rearranged(make_batch(seed), PPO, mode, order, padding, torch.nan)


@every_method
@given(
    lengths=lengths_of_responses,
    holes=st.integers(0, 3),
    added=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=3),
    padding=st.integers(0, 2),
    mode=modes,
    fill=garbage,
    seed=seeds,
    data=st.data(),
)
@few
def test_loss_when_permuted_padded_and_joined_by_masked_responses_then_same_loss_and_gradient(
    method, lengths, holes, added, padding, mode, fill, seed, data
):
    batch = make_batch(seed, lengths=lengths, num_holes=holes)
    grown = with_masked_responses(batch, [n for n, _ in added], [group for _, group in added], fill)
    loss, gradient = step(batch, method, mode)
    grown_loss, grown_gradient = step(grown, method, mode)
    torch.testing.assert_close(grown_loss, loss, rtol=1e-11, atol=1e-14)
    torch.testing.assert_close(grown_gradient[: sum(lengths)], gradient, rtol=1e-11, atol=1e-14)
    assert not grown_gradient[sum(lengths) :].any()
    order = data.draw(st.permutations(range(len(grown.lengths))))
    unchanged_when_rearranged(grown, method, mode, order, padding, fill)


def unchanged_when_rearranged(batch, method, mode, order, padding, fill):
    loss, gradient = step(batch, method, mode)
    other = rearranged(batch, list(order), padding, fill)
    other_loss, other_gradient = step(other, method, mode)
    torch.testing.assert_close(other_loss, loss, rtol=1e-11, atol=1e-14)
    lengths = batch.lengths.tolist()
    back = dict(zip(order, other_gradient.split(other.lengths.tolist()), strict=True))
    restored = torch.cat([back[i][: lengths[i]] for i in range(len(lengths))])
    torch.testing.assert_close(restored, gradient, rtol=1e-11, atol=1e-14)
    for i in range(len(lengths)):
        assert back[i][lengths[i] :].tolist() == [0.0] * padding


@every_method
@given(lengths=lengths_of_responses, holes=st.integers(0, 3), mode=modes, fill=garbage, seed=seeds)
@example(lengths=[1, 1, 1], holes=1, mode="seq-mean-token-mean", fill=torch.nan, seed=0)
@few
def test_loss_when_every_masked_position_holds_garbage_then_bit_for_bit_the_same(
    method, lengths, holes, mode, fill, seed
):
    clean = make_batch(seed, lengths=lengths, num_holes=holes)
    batch = spoiled(clean, ~clean.valid, fill)
    decisions = decide(batch, method)
    told = decide(clean, method)
    assert torch.equal(decisions.policy, told.policy) and torch.equal(decisions.entropy, told.entropy)
    whole = [range(len(lengths))]
    loss, gradient = sum_of_parts(clean, method, told, mode, whole)

    masked = decisions.policy == 0
    unread = masked & ~decisions.counted if method.loss.of_whole_responses else masked
    batch = replace(
        batch,
        policy=torch.where(unread, fill, batch.policy),
        entropies=torch.where(decisions.entropy, batch.entropies, fill),
    )
    decisions = replace(
        decisions,
        reference=torch.where(unread, fill, decisions.reference),
        advantages=torch.where(masked, fill, decisions.advantages),
    )
    again, gradient_again = sum_of_parts(batch, method, decisions, mode, whole)
    assert bool(loss.isfinite()) and bool(gradient.isfinite().all())
    assert torch.equal(again, loss) and torch.equal(gradient_again, gradient)
    assert not gradient[unread].any()


@every_method
@pytest.mark.parametrize("lengths", [[0], [1], [1, 0, 3]], ids=str)
def test_loss_when_everything_is_masked_then_zero_and_no_gradient(method, lengths):
    for fill in (torch.nan, torch.inf, -torch.inf):
        clean = make_batch(0, lengths=lengths, num_holes=sum(lengths))
        batch = spoiled(clean, torch.ones_like(clean.valid), fill)
        for mode in MODES:
            loss, gradient = step(batch, method, mode)
            assert loss.item() == 0.0 and gradient.tolist() == [0.0] * sum(lengths)


def test_step_when_float32_then_close_to_float64():
    loss, gradient = step(make_batch(3), PPO, "token-mean")
    single_loss, single_gradient = step(make_batch(3, torch.float32), PPO, "token-mean")
    assert single_gradient.dtype == torch.float32
    torch.testing.assert_close(single_loss.double(), loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(single_gradient.double(), gradient, rtol=1e-4, atol=1e-6)


def test_masks_when_critics_vote_then_same_tokens_whatever_the_order_and_padding():
    batch = make_batch(1)
    masks = value_std_masks(value_std(batch.values), advantage_share=0.3, entropy_share=0.2)
    assert (masks.num_advantage_masked, masks.num_entropy_filtered) == (10, 6)
    order = [3, 1, 7, 0, 2, 6, 5, 4]
    other = rearranged(batch, order, 2, torch.nan)
    again = value_std_masks(
        value_std(other.values), advantage_share=0.3, entropy_share=0.2, valid=other.valid
    )
    parts = dict(zip(order, again.advantage_keep.split(other.lengths.tolist()), strict=True))
    restored = torch.cat([parts[i][: LENGTHS[i]] for i in range(8)])
    assert torch.equal(restored, masks.advantage_keep)
