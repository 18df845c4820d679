"""Batches of nothing, responses of no or one token, and batches in which no token counts."""

import math

import pytest
import torch

from asyppo_async.algorithms.advantages import gae, length_adaptive_lambda, value_targets, whiten
from asyppo_async.algorithms.aggregation import MODES, aggregate, denominator, token_weights
from asyppo_async.algorithms.calibration import relative_position
from asyppo_async.algorithms.critics import ensemble_value, value_std, value_std_masks
from asyppo_async.algorithms.group_advantages import grpo, mixed_groups, reinforce_plus_plus, rloo
from asyppo_async.algorithms.losses import ppo_clip
from asyppo_async.algorithms.metrics import (
    explained_variance,
    quantiles,
    ratio_statistics,
    staleness_statistics,
)
from asyppo_async.algorithms.mismatch import SequenceGate, TokenRule, correct_mismatch
from asyppo_async.algorithms.sequence_losses import gspo
from asyppo_async.algorithms.token_classes import classify_tokens, count_classes, token_masks
from asyppo_async.algorithms.truncation import episode_ends
from asyppo_async.algorithms.trust_masks import m2po_keep, opsm_keep

RULE = TokenRule(kind="icepop", low=0.5, high=5.0)
GATES = [
    SequenceGate(kind=kind, low=0.5, high=2.0)
    for kind in ("max_log_ratio", "max_ratio", "token_band", "product", "geometric", "binary_kl")
]


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_everything_when_there_is_no_token_then_empty_results_and_no_step(lengths):
    n, nothing = torch.tensor(lengths, dtype=torch.int64), torch.zeros(0)
    rewards, ids = torch.ones(len(lengths)), torch.zeros(len(lengths), dtype=torch.int64)
    correction = correct_mismatch(nothing, nothing, n, rule=RULE, gates=GATES)
    assert correction.keep_sequences.tolist() == [True] * len(lengths)
    classes = classify_tokens(n, keep_sequences=correction.keep_sequences, keep_tokens=correction.keep_tokens)
    masks = token_masks(classes)
    assert count_classes(classes).trained == 0
    selection = value_std_masks(value_std(torch.zeros(2, 0)), advantage_share=0.2, entropy_share=0.2)
    assert selection.degenerate
    advantages = gae(rewards, ensemble_value(torch.zeros(2, 0)), n, length_adaptive_lambda(n, 1.5))
    targets = value_targets(rewards, nothing, n, 0.9)
    whitened = whiten(advantages)
    terms = ppo_clip(nothing, advantages, clip_low=0.2, clip_high=0.2).terms
    for result in (
        advantages,
        targets,
        whitened,
        terms,
        gspo(nothing, nothing, n, clip_low=1, clip_high=1).terms,
    ):
        assert result.tolist() == []
    for mode in MODES:
        total = denominator(mode, n, masks.denominator, max_length=4)
        assert total == 0.0
        assert aggregate(terms, token_weights(mode, n, masks.denominator), total).item() == 0.0
    assert m2po_keep(nothing, threshold=0.04, candidates="all").tolist() == []
    assert opsm_keep(-rewards, nothing, n, threshold=0.1).tolist() == [True] * len(lengths)
    truncated = torch.ones(len(lengths), dtype=torch.bool)
    assert episode_ends(rewards, nothing, n, truncated, "egae").bootstrap_values.tolist() == [0.0] * len(
        lengths
    )
    assert grpo(rewards, ids).tolist() == rloo(rewards, ids).tolist() == [0.0] * len(lengths)
    assert mixed_groups(rewards > 0, ids).tolist() == [False] * len(lengths)
    assert reinforce_plus_plus(rewards, n).tolist() == []
    assert relative_position(n, 4).tolist() == []


def test_metrics_when_there_is_no_token_then_nan_and_empty_histograms():
    nothing = torch.zeros(0)
    statistics = ratio_statistics(nothing)
    assert statistics.num_tokens == 0
    assert all(
        math.isnan(value)
        for value in (statistics.mean, statistics.p99, statistics.effective_sample_size, statistics.kl_k3)
    )
    assert math.isnan(explained_variance(nothing, nothing))
    assert all(math.isnan(value) for value in quantiles(nothing, (0.1, 0.9)))
    age = staleness_statistics(torch.zeros(0, dtype=torch.int64), torch.tensor([0]), 3)
    assert (age.token_histogram, age.sequence_histogram, age.maximum) == ((), (), 0)


def test_single_tokens_when_each_response_is_one_then_advantage_is_reward_minus_value():
    rewards, values = torch.tensor([1.0, -1.0]), torch.tensor([0.25, 0.5])
    lengths = torch.tensor([1, 1])
    for lambda_ in (0.0, 0.95, 1.0, length_adaptive_lambda(lengths, 0.05)):
        assert gae(rewards, values, lengths, lambda_).tolist() == [0.75, -1.5]


def test_step_when_every_token_is_rejected_then_zero_loss_and_zero_gradient_in_every_mode():
    lengths = torch.tensor([2, 1])
    proximal = torch.tensor([torch.nan, torch.inf, -torch.inf])
    correction = correct_mismatch(proximal, torch.full((3,), -1.0), lengths, rule=RULE, gates=GATES)
    assert correction.counts.num_rejected_tokens == 3 and correction.counts.num_rejected_sequences == 0
    for renormalise in (False, True):
        masks = token_masks(
            classify_tokens(lengths, keep_tokens=correction.keep_tokens), renormalise=renormalise
        )
        for mode in MODES:
            logs = torch.zeros(3, requires_grad=True)
            terms = ppo_clip(logs, torch.ones(3), clip_low=0.2, clip_high=0.2).terms
            weights = token_weights(mode, lengths, masks.denominator) * correction.weights
            total = denominator(
                mode, lengths, masks.denominator, max_length=4, responses_counted=masks.responses
            )
            loss = aggregate(terms, weights, total)
            loss.backward()
            assert loss.item() == 0.0 and logs.grad.tolist() == [0.0] * 3
            assert (total == 0.0) == (renormalise and mode == "token-mean")
