import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyppo_async.algorithms.critics import (
    ensemble_value,
    select_highest,
    select_lowest,
    share_count,
    split_groups,
    value_loss,
    value_std,
    value_std_masks,
)

F64 = torch.float64
V1 = [0.10, 0.30, 0.60, -0.2, -0.5, 0.0, 0.2, 0.4, 0.7, -0.1]
V2 = [0.20, 0.26, 0.10, -0.6, -0.52, 0.3, 0.25, 0.96, 0.58, 0.7]
VALUES = torch.tensor([V1, V2], dtype=F64)
TIES = torch.tensor([0, 0, 0, 0, 0.125, 0.25, 0.375, 0.5, 0.75, 0.75], dtype=F64)


def slow_lowest(scores, share, valid):
    """A stable sort of the valid flat indices by score."""
    indices = [i for i in range(len(scores)) if valid[i]]
    count = int(share * len(indices) + 1e-9)
    chosen = sorted(indices, key=lambda i: (scores[i], i))[:count]
    return [i in chosen for i in range(len(scores))]


def split(groups, num_critics=2, seed=0, step=7):
    """Rows of (prompt id, size), one group per draw."""
    rows = [(name, draw, sample) for draw, (name, size) in enumerate(groups) for sample in range(size)]
    names, draws, samples = zip(*rows, strict=True)
    critics = split_groups(names, draws, samples, num_critics=num_critics, seed=seed, step=step)
    return rows, critics.tolist()


def test_ensemble_when_two_critics_then_golden(golden, check):
    check(ensemble_value(VALUES), golden["asy_vbar"])
    check(value_std(VALUES), golden["asy_sigma_pop"])
    larger = value_std(VALUES, sample=True) / value_std(VALUES)
    check(larger, [golden["asy_sigma_sample_over_pop"]] * 10)
    assert torch.equal(ensemble_value(VALUES, "min"), VALUES.min(0).values)


@pytest.mark.report("P64")
def test_value_std_when_four_critics_then_population(golden, check):
    four = torch.tensor([[0.1], [0.2], [0.4], [0.5]], dtype=F64)
    check(torch.cat([value_std(four), value_std(four, sample=True)]), golden["std_M4_pop_sample"])


@pytest.mark.report("P64")
def test_value_std_when_one_critic_then_zero():
    assert value_std(torch.ones(1, 3)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.report("P64")
def test_masks_when_std_is_ranked_over_the_batch_then_golden(golden, check):
    masks = value_std_masks(value_std(VALUES), advantage_share=0.2, entropy_share=0.2)
    check(masks.advantage_keep.double(), golden["asy_IA_batch"])
    check(masks.entropy_keep.double(), golden["asy_IH_batch"])
    assert (masks.num_advantage_masked, masks.num_entropy_filtered, masks.degenerate) == (2, 2, False)


def test_masks_when_critics_are_identical_then_skipped_and_flagged():
    values = torch.randn(1, 50).expand(2, 50)
    masks = value_std_masks(value_std(values), advantage_share=0.2, entropy_share=0.2)
    assert masks.degenerate
    assert bool(masks.advantage_keep.all()) and bool(masks.entropy_keep.all())


def test_masks_when_nothing_is_valid_then_degenerate_and_empty():
    masks = value_std_masks(
        torch.full((3,), torch.nan),
        advantage_share=0.2,
        entropy_share=0.2,
        valid=torch.zeros(3, dtype=torch.bool),
    )
    assert masks.degenerate
    assert not bool(masks.advantage_keep.any())


def test_selection_when_scores_tie_then_exact_count_and_first_indices(golden, check):
    check((~select_lowest(TIES, 0.2)).double(), golden["asy_ties_low2"])
    check((~select_highest(TIES, 0.1)).double(), golden["asy_ties_high1"])
    second = TIES.kthvalue(2).values
    at_most_the_second = int((second >= TIES).sum())
    assert at_most_the_second == golden["asy_ties_threshold_masks"] > int(select_lowest(TIES, 0.2).sum()) == 2
    nothing_tells_them_apart = torch.zeros(5, dtype=F64)
    check(
        (~select_lowest(nothing_tells_them_apart, 0.2)).double(), golden["asy_grp_zero_var_sigma_all_equal"]
    )


def test_share_count_when_product_is_not_exact_then_floor_of_the_true_product(golden):
    naive = int(0.29 * 100)
    assert [naive, share_count(0.29, 100), share_count(0.2, 4), share_count(0.2, 5)] == golden[
        "floor_pitfall"
    ]


def test_share_count_when_sequences_are_short_then_none_where_rounding_up_would_take_one_of_each(golden):
    floors = [share_count(0.2, length) for length in (3, 2, 4, 1)]
    assert floors == [0] * 4 and [count + 1 for count in floors] == golden["asy_IA_per_seq_ceil_count"]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=30),
    st.sampled_from([0.0, 0.1, 0.2, 0.29, 0.5, 1.0]),
)
@settings(max_examples=80, deadline=None)
def test_selection_when_ties_and_invalid_tokens_then_equals_a_stable_sort(tokens, share):
    scores = [float(score) for score, _ in tokens]
    valid = [flag for _, flag in tokens]
    dirty = torch.tensor([s if keep else torch.nan for s, keep in zip(scores, valid, strict=True)], dtype=F64)
    mask = torch.tensor(valid)
    assert select_lowest(dirty, share, mask).tolist() == slow_lowest(scores, share, valid)
    negated = [-score for score in scores]
    assert select_highest(dirty, share, mask).tolist() == slow_lowest(negated, share, valid)


def test_selection_when_a_valid_score_is_nan_then_raises():
    with pytest.raises(ValueError, match="1 of 2 scores are not finite"):
        select_lowest(torch.tensor([0.1, torch.nan]), 0.5)


@pytest.mark.report("P64")
def test_split_when_groups_are_uneven_then_golden(golden):
    _, critics = split([("p0", 5), ("p1", 5), ("p2", 5), ("p3", 3)])
    assert critics == [c for group in golden["asy_split_K5_5_5_3_M2"] for c in group]
    assert [critics.count(m) for m in (0, 1)] == golden["asy_split_totals"]
    # The critic at the group's offset gets the odd one.
    groups = [critics[start : start + size] for start, size in ((0, 5), (5, 5), (10, 5), (15, 3))]
    assert [max((0, 1), key=group.count) for group in groups] == golden["asy_split_offsets"]


def test_split_when_single_rollout_then_critics_rotate(golden):
    _, critics = split([(f"q{i}", 1) for i in range(6)])
    assert critics == golden["asy_split_K1_groups6"]


@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=8),
    st.integers(1, 5),
    st.integers(0, 99),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
@pytest.mark.report("P64")
def test_split_when_arrival_order_changes_then_same_critic_and_balanced(sizes, num_critics, step, random):
    groups = [(f"p{i}", size) for i, size in enumerate(sizes)]
    rows, critics = split(groups, num_critics, step=step)
    for draw in range(len(sizes)):
        within = [critic for row, critic in zip(rows, critics, strict=True) if row[1] == draw]
        counts = [within.count(m) for m in range(num_critics)]
        assert max(counts) - min(counts) <= 1
    totals = [critics.count(m) for m in range(num_critics)]
    assert sum(totals) == len(rows) and max(totals) - min(totals) <= 1
    shuffled = list(zip(rows, critics, strict=True))
    random.shuffle(shuffled)
    names, draws, samples = zip(*[row for row, _ in shuffled], strict=True)
    again = split_groups(names, draws, samples, num_critics=num_critics, seed=0, step=step).tolist()
    assert again == [critic for _, critic in shuffled]


def test_value_loss_when_clipped_then_golden(golden, check):
    values = torch.tensor([0.5, 0.5, 0.1], dtype=F64)
    targets = torch.tensor([1.0, -1.0, 1.0], dtype=F64)
    check(value_loss(values, targets, clip=0.2, old_values=torch.zeros(3, dtype=F64)), golden["value_clip"])


def test_value_loss_when_paper_form_then_golden_mean_squared_error(golden, check):
    rewards = torch.tensor([1, 1, 1, -1, -1, 1, 1, 1, 1, -1], dtype=F64)
    first = torch.tensor([1, 1, 1, 0, 0, 1, 1, 1, 1, 0], dtype=torch.bool)
    terms = value_loss(VALUES, rewards.expand(2, 10), half=False)
    expected = golden["asy_critic_mse_tokmean_c1_on_resp0_2__c2_on_1_3"]
    check(torch.stack([terms[0][first].mean(), terms[1][~first].mean()]), expected)


def test_value_loss_when_differentiated_then_matches_central_differences():
    values = torch.tensor([0.5, -0.3, 0.11, 0.9], dtype=F64, requires_grad=True)
    targets = torch.tensor([1.0, -1.0, 0.7, 0.2], dtype=F64)
    old = torch.tensor([0.2, -0.25, 0.4, 0.85], dtype=F64)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, targets), values)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, targets, clip=0.2, old_values=old), values)
