import pytest
import torch

from asyppo_async.algorithms.composition import check_ratio_use, entropy_coefficients, policy_coefficients
from asyppo_async.algorithms.token_classes import TokenClass, token_masks
from asyppo_async.errors import ConfigError

CLASSES = torch.tensor(
    [
        TokenClass.TRAINED,
        TokenClass.TRAINED,
        TokenClass.REJECTED_TOKEN,
        TokenClass.REJECTED_SEQUENCE,
        TokenClass.STALE,
        TokenClass.FILTERED,
        TokenClass.INVALID,
    ],
    dtype=torch.uint8,
)


@pytest.mark.parametrize("rule", ["icepop", "truncate", "clamp", "importance"])
def test_ratio_use_when_loss_and_weight_both_hold_the_mismatch_then_refused(rule):
    with pytest.raises(ConfigError, match="counts the mismatch twice"):
        check_ratio_use("behaviour", rule)
    check_ratio_use("proximal", rule)


@pytest.mark.parametrize("rule", ["none", "icepop_mask", "kpop"])
def test_ratio_use_when_the_rule_does_not_weight_then_allowed(rule):
    check_ratio_use("behaviour", rule)


def test_coefficients_when_masked_weights_are_nan_then_exactly_zero():
    weights = torch.tensor([1.5, 0.5, torch.nan, torch.inf, -torch.inf, torch.nan, torch.nan])
    keep = torch.tensor([True, False] + [True] * 5)
    masks = token_masks(CLASSES)
    assert policy_coefficients(masks, weights).tolist() == [1.5, 0.5, 0, 0, 0, 0, 0]
    assert policy_coefficients(masks, weights, keep).tolist() == [1.5, 0, 0, 0, 0, 0, 0]
    assert entropy_coefficients(masks).tolist() == [True, True, True, False, False, False, False]
    assert entropy_coefficients(masks, keep).tolist() == [True, False, True, False, False, False, False]
