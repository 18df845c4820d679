"""Advantages without a critic: one number per response, from the rewards of its group or of the batch.

Legend: `B` responses, `T` packed tokens. `group_ids` is [B] integers, equal for the responses of one draw;
their order and their values mean nothing. `packed.spread` lays a result over the tokens.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyppo_async.algorithms.advantages import whiten
from asyppo_async.algorithms.packed import compute_dtype, spread

SingletonAdvantage = Literal["zero", "reward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """Of each response's group, repeated for each of its responses."""

    mean: Tensor
    """[B]"""
    size: Tensor
    """[B], in the dtype of the mean."""
    squared_deviations: Tensor
    """[B] sum of squared deviations from the mean."""


def group_statistics(rewards: Tensor, group_ids: Tensor) -> GroupStatistics:
    """Mean, size and sum of squared deviations of each response's group, in float64."""
    exact = rewards.detach().double()
    _, index = torch.unique(group_ids, return_inverse=True)
    num_groups = int(index.max()) + 1 if index.numel() else 0
    size = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, index, torch.ones_like(exact))
    mean = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, index, exact) / size
    squares = torch.zeros(num_groups, dtype=torch.float64).index_add_(
        0, index, (exact - mean[index]).square()
    )
    return GroupStatistics(mean=mean[index], size=size[index], squared_deviations=squares[index])


def grpo(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    unbiased: bool = True,
    epsilon: float = 1e-6,
    singleton: SingletonAdvantage = "zero",
) -> Tensor:
    """(R - mean of the group) / (std of the group + epsilon), [B]. (DeepSeekMath 2402.03300.)

    Args:
        rewards: [B].
        group_ids: [B].
        unbiased: divide the variance by K - 1 (verl, ROLL, XTuner); the paper does not say.
        epsilon: keeps a group of equal rewards at 0.
        singleton: advantage of a response without siblings: 0, or its reward (verl: mean 0, std 1).
    """
    statistics = group_statistics(rewards, group_ids)
    freedom = (statistics.size - 1).clamp(min=1) if unbiased else statistics.size
    std = (statistics.squared_deviations / freedom).sqrt()
    advantages = (rewards.double() - statistics.mean) / (std + epsilon)
    if singleton == "reward":
        advantages = torch.where(statistics.size > 1, advantages, rewards.double())
    return advantages.to(compute_dtype(rewards))


def dr_grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """R - mean of the group, [B]; goes with the aggregation seq-mean-token-sum-norm. (Dr.GRPO 2503.20783.)"""
    statistics = group_statistics(rewards, group_ids)
    return (rewards.double() - statistics.mean).to(compute_dtype(rewards))


def rloo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """R - mean of the others of the group = K / (K - 1) (R - mean), [B]; 0 for a singleton. (RLOO
    2402.14740.)
    """
    statistics = group_statistics(rewards, group_ids)
    factor = statistics.size / (statistics.size - 1).clamp(min=1)
    return (factor * (rewards.double() - statistics.mean)).to(compute_dtype(rewards))


def reinforce_plus_plus(
    rewards: Tensor,
    lengths: Tensor,
    *,
    group_ids: Tensor | None = None,
    valid: Tensor | None = None,
    unbiased: bool = False,
    epsilon: float = 1e-8,
) -> Tensor:
    """Token returns whitened once over all valid tokens of the batch, [T]. (REINFORCE++ 2501.03262.)

    With `group_ids` the mean of the group is subtracted first (the "baseline" form). The measure is that of
    tokens: a long response weighs more in mean and variance.
    """
    centred = rewards if group_ids is None else dr_grpo(rewards, group_ids)
    return whiten(spread(centred, lengths), valid, unbiased=unbiased, epsilon=epsilon)


def whiten_groups(
    advantages: Tensor,
    lengths: Tensor,
    group_ids: Tensor,
    valid: Tensor | None = None,
    *,
    unbiased: bool = False,
    epsilon: float = 1e-8,
) -> Tensor:
    """(A - mean) / sqrt(variance + epsilon) over the valid tokens of each group, [T]; 0 elsewhere.

    As `advantages.whiten`, but a hard prompt does not borrow the scale of an easy one.
    """
    everything = torch.ones_like(advantages, dtype=torch.bool) if valid is None else valid
    chosen = advantages[everything]
    statistics = group_statistics(chosen, spread(group_ids, lengths)[everything])
    freedom = (statistics.size - 1).clamp(min=1) if unbiased else statistics.size
    variance = statistics.squared_deviations / freedom
    whitened = (chosen.double() - statistics.mean) * torch.rsqrt(variance + epsilon)
    return torch.zeros_like(advantages).masked_scatter_(everything, whitened.to(advantages.dtype))


def flash_reinforce(rewards: Tensor) -> Tensor:
    """R - mean over the batch, [B]; goes with the gate `binary_kl` at 3e-3 and weight rho. (FlashREINFORCE.)"""
    exact = rewards.detach().double()
    centred = exact - exact.mean() if exact.numel() else exact
    return centred.to(compute_dtype(rewards))


def prior_advantages(
    rewards: Tensor, prior_values: Tensor, *, normalise: bool = True, epsilon: float = 1e-8
) -> Tensor:
    """R - value of the prompt before this response, whitened over the responses of the batch, [B]. (SPO
    2509.13232.)

    Args:
        rewards: [B] on the scale of the values (SPO: 0 or 1).
        prior_values: [B] from `prompt_values.PromptValues` *before* its update with these rewards.
        normalise: over responses; with the token measure of SPO++ spread first and use `advantages.whiten`.
        epsilon: added to the variance.
    """
    advantages = (rewards.double() - prior_values.double()).to(compute_dtype(rewards))
    return whiten(advantages, epsilon=epsilon) if normalise else advantages


def mixed_groups(correct: Tensor, group_ids: Tensor) -> Tensor:
    """Which responses belong to a group with at least one right and one wrong answer, [B] bool. (DAPO
    2503.14476.)

    Args:
        correct: [B] bool, the binary verdict and not a shaped reward.
        group_ids: [B].
    """
    share = group_statistics(correct.double(), group_ids).mean
    return (share > 0) & (share < 1)


def overlong_penalty(lengths: Tensor, *, max_length: int, cache: int) -> Tensor:
    """DAPO's soft penalty for long responses, [B] float64, to be added to R on the last token.

    0                                      if T <= max_length - cache
    ((max_length - cache) - T) / cache     up to max_length
    -1                                     above
    """
    if not 0 < cache <= max_length:
        raise ValueError(f"the cache must lie in (0, max_length = {max_length}], got {cache}")
    return ((max_length - cache - lengths).double() / cache).clamp(-1.0, 0.0)
