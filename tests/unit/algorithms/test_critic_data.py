import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyppo_async.algorithms.critic_data import (
    advantage_values,
    critic_responses,
    crossfit_value,
    random_split,
)
from asyppo_async.algorithms.critics import value_std

F64 = torch.float64


def batch(sizes):
    rows = [(f"p{draw}", draw, sample) for draw, size in enumerate(sizes) for sample in range(size)]
    return [list(column) for column in zip(*rows, strict=True)]


def sees(how, sizes, num_critics=2, **more):
    return critic_responses(how, *batch(sizes), num_critics=num_critics, seed=0, step=7, **more)


def test_group_split_when_written_as_masks_then_golden_and_disjoint(golden):
    masks = sees("group_split", [5, 5, 5, 3])
    expected = torch.tensor([c for group in golden["asy_split_K5_5_5_3_M2"] for c in group])
    assert torch.equal(masks[1].long(), expected)
    assert masks.sum(0).tolist() == [1] * 18


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_random_split_when_groups_vary_then_disjoint_covering_and_even(sizes, num_critics):
    masks = sees("random_split", sizes, num_critics)
    assert masks.sum(0).tolist() == [1] * sum(sizes)
    totals = masks.sum(1)
    assert int(totals.max() - totals.min()) <= 1


def test_random_split_when_order_changes_then_same_critic():
    prompts, draws, samples = batch([3, 4])
    straight = random_split(prompts, draws, samples, num_critics=2, seed=1, step=2)
    backward = random_split(prompts[::-1], draws[::-1], samples[::-1], num_critics=2, seed=1, step=2)
    assert torch.equal(straight, backward.flip(0))


def test_shared_data_when_asked_then_all_see_all():
    assert bool(sees("shared", [2, 3], 3).all())


def test_small_groups_when_all_see_all_then_only_groups_below_m():
    rotated, everyone = sees("group_split", [1, 4], 3), sees("group_split", [1, 4], 3, small_groups="all")
    assert rotated[:, 0].sum() == 1 and everyone[:, 0].sum() == 3
    assert torch.equal(rotated[:, 1:], everyone[:, 1:])


def test_crossfit_when_a_critic_was_trained_on_a_response_then_it_does_not_speak(golden):
    leak = golden["asy_selfleak_M2_tabular"]
    # Tabular: return 1, both values 0 before; the trained critic moved by .1 of the error.
    values = torch.tensor([[0.1, 0.1, 0.0], [0.0, 0.0, 0.1]], dtype=F64)
    trained_on = torch.tensor([[True, False], [False, True]])
    lengths = torch.tensor([2, 1])
    untrained = torch.zeros_like(values)
    assert (1 - untrained.mean(0)).tolist() == [leak["A_before"]] * 3
    assert (1 - crossfit_value(values, trained_on, lengths)).tolist() == [leak["A_crossfit"]] * 3
    assert (1 - values.mean(0)).tolist() == pytest.approx([leak["A_after_mean"]] * 3)
    assert 1 - values[0, 0].item() == pytest.approx(leak["A_after_own"])


def test_crossfit_when_every_critic_saw_a_response_then_says_so():
    with pytest.raises(ValueError, match="1 of 2 responses were trained on by all 2 critics"):
        crossfit_value(torch.zeros(2, 2), torch.tensor([[True, False], [True, True]]), torch.tensor([1, 1]))


def test_crossfit_when_an_empty_response_was_seen_by_all_then_no_matter():
    values = crossfit_value(
        torch.ones(2, 1), torch.tensor([[True, True], [False, True]]), torch.tensor([1, 0])
    )
    assert values.tolist() == [1.0]


def train_linear(features, returns, weight, mask, steps=50, rate=0.1):
    for _ in range(steps):
        error = features[mask] @ weight - returns[mask]
        weight = weight - rate * features[mask].T @ error / len(error)
    return weight


@pytest.mark.parametrize("how", ["shared", "group_split"])
def test_critics_when_data_is_shared_then_std_stays_zero_and_when_split_it_does_not(how):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(24, 6, generator=generator, dtype=F64)
    returns = torch.randint(0, 2, (24,), generator=generator).to(F64) * 2 - 1
    masks, start = sees(how, [4] * 6), torch.zeros(6, dtype=F64)
    weights = [train_linear(features, returns, start, mask) for mask in masks]
    std = value_std(torch.stack([features @ weight for weight in weights]))
    assert (float(std.max()) == 0.0) == (how == "shared")


def test_advantage_values_when_chosen_then_before_after_or_without_the_critics_that_learned():
    before = torch.zeros(2, 3, dtype=F64)
    after = torch.tensor([[0.2, 0.2, 0.0], [0.0, 0.0, 0.4]], dtype=F64)
    more = {"trained_on": torch.tensor([[True, False], [False, True]]), "lengths": torch.tensor([2, 1])}
    assert advantage_values("pre", before=before).tolist() == [0.0, 0.0, 0.0]
    assert advantage_values("post", before=before, after=after).tolist() == [0.1, 0.1, 0.2]
    assert advantage_values("post", after=after, how="min").tolist() == [0.0, 0.0, 0.0]
    assert advantage_values("crossfit", after=after, **more).tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="'pre' needs values from before"):
        advantage_values("pre", after=after)
    with pytest.raises(ValueError, match="needs trained_on and lengths"):
        advantage_values("crossfit", after=after)
