import pytest
import torch

from asyppo_async.algorithms.token_classes import TokenClass, classify_tokens, count_classes, token_masks

# One response per class where the class is of a response; see the table of the module.
ORDER = [TokenClass.TRAINED, TokenClass.REJECTED_TOKEN, TokenClass.REJECTED_SEQUENCE]
ORDER += [TokenClass.STALE, TokenClass.FILTERED, TokenClass.INVALID]


def one_of_each():
    return torch.tensor([int(c) for c in ORDER], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("critic_trains_on", "renormalise", "column", "expected"),
    [
        ("all", False, "policy", [1, 0, 0, 0, 0, 0]),
        ("all", False, "entropy", [1, 1, 0, 0, 0, 0]),
        ("all", False, "value", [1, 1, 1, 1, 1, 0]),
        ("kept", False, "value", [1, 0, 0, 0, 0, 0]),
        ("all", False, "advantage", [1, 1, 1, 1, 0, 0]),
        ("all", False, "ranking", [1, 1, 1, 1, 0, 0]),
        ("all", False, "denominator", [1, 1, 1, 1, 0, 0]),
        ("all", True, "denominator", [1, 0, 0, 0, 0, 0]),
        ("all", True, "responses", [1, 1, 1, 1, 0, 0]),
        ("all", False, "measured", [1, 1, 1, 0, 0, 0]),
    ],
)
def test_masks_when_one_token_per_class_then_the_table(critic_trains_on, renormalise, column, expected):
    masks = token_masks(one_of_each(), critic_trains_on=critic_trains_on, renormalise=renormalise)
    assert getattr(masks, column).int().tolist() == expected


def test_classes_when_several_reasons_apply_then_the_first_of_the_order_wins():
    lengths = torch.tensor([2, 2, 2, 1])
    classes = classify_tokens(
        lengths,
        valid=torch.tensor([True, True, True, True, True, True, False]),
        filtered_responses=torch.tensor([False, False, True, True]),
        stale=torch.tensor([True, False, False, False, True, True, True]),
        keep_sequences=torch.tensor([False, True, False, False]),
        keep_tokens=torch.tensor([False, False, False, True, False, True, False]),
    )
    names = [TokenClass(c).name for c in classes.tolist()]
    assert names == [
        "STALE",
        "REJECTED_SEQUENCE",
        "REJECTED_TOKEN",
        "TRAINED",
        "FILTERED",
        "FILTERED",
        "INVALID",
    ]


def test_counts_when_classes_are_given_then_they_sum_to_all_tokens():
    counts = count_classes(torch.cat([one_of_each(), one_of_each()[:1]]))
    assert (counts.trained, counts.rejected_token, counts.rejected_sequence) == (2, 1, 1)
    assert (counts.stale, counts.filtered, counts.invalid) == (1, 1, 1)


def test_classes_when_batch_is_empty_then_empty():
    assert classify_tokens(torch.tensor([0, 0])).tolist() == []
