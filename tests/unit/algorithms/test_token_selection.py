import pytest
import torch

from asyppo_async.algorithms.critics import value_std, value_std_masks
from asyppo_async.algorithms.token_selection import choose_scores, random_scores, select_tokens

F64 = torch.float64
V1 = [0.10, 0.30, 0.60, -0.2, -0.5, 0.0, 0.2, 0.4, 0.7, -0.1]
V2 = [0.20, 0.26, 0.10, -0.6, -0.52, 0.3, 0.25, 0.96, 0.58, 0.7]
STD = value_std(torch.tensor([V1, V2], dtype=F64))
LENGTHS = torch.tensor([3, 2, 4, 1])


def test_selection_when_by_value_std_then_same_as_the_papers_masks(golden, check):
    masked, filtered = select_tokens(STD, 0.2, "lowest"), select_tokens(STD, 0.2, "highest")
    check((~masked.selected).double(), golden["asy_IA_batch"])
    check((~filtered.selected).double(), golden["asy_IH_batch"])
    masks = value_std_masks(STD, advantage_share=0.2, entropy_share=0.2)
    assert torch.equal(masks.advantage_keep, ~masked.selected)
    assert torch.equal(masks.entropy_keep, ~filtered.selected)


def test_selection_when_per_sequence_then_floor_of_each_response(golden):
    kept = [x for row in golden["asy_IA_per_seq_floor"] for x in row]
    selection = select_tokens(STD, 0.2, "lowest", scope="sequence", lengths=LENGTHS)
    assert (~selection.selected).double().tolist() == kept and selection.count == 0
    half = select_tokens(STD, 0.5, "lowest", scope="sequence", lengths=LENGTHS)
    assert half.selected.nonzero().squeeze(1).tolist() == [1, 4, 6, 8]


@pytest.mark.parametrize("select_by", ["value_std", "entropy", "random"])
def test_selection_when_scores_differ_in_kind_then_same_count(select_by):
    entropies = torch.arange(10.0)
    scores = choose_scores(select_by, value_std=STD, entropies=entropies, seed=1, step=3, purpose="advantage")
    valid = torch.ones(10, dtype=torch.bool)
    valid[0] = False
    selection = select_tokens(scores, 0.34, "lowest", valid=valid)
    assert selection.count == 3 and not selection.selected[0]
    if select_by == "entropy":
        assert selection.selected.nonzero().squeeze(1).tolist() == [1, 2, 3]


def test_selection_when_none_then_nothing_and_not_degenerate():
    selection = select_tokens(choose_scores("none", value_std=STD), 0.2, "lowest", valid=STD >= 0)
    assert (selection.count, selection.degenerate, len(selection.selected)) == (0, False, 10)
    with pytest.raises(ValueError, match="got None for both"):
        select_tokens(None, 0.2, "lowest")


def test_selection_when_all_scores_are_equal_then_flagged():
    selection = select_tokens(torch.zeros(5), 0.2, "lowest")
    assert (selection.count, selection.degenerate) == (0, True)


def test_random_scores_when_seed_step_or_purpose_change_then_they_change_and_else_not():
    first = random_scores(20, seed=1, step=2, purpose="advantage")
    assert torch.equal(first, random_scores(20, seed=1, step=2, purpose="advantage"))
    for other in ({"seed": 2, "step": 2}, {"seed": 1, "step": 3}):
        assert not torch.equal(first, random_scores(20, **other, purpose="advantage"))
    assert not torch.equal(first, random_scores(20, seed=1, step=2, purpose="entropy"))
