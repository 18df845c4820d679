"""Losses of the policy, one term per token, to be minimised.

    r_t = pi_theta / pi_old     from log pi_theta - log pi_old, clamped to +-20 before exp

Legend: `T` packed tokens. Advantages and references carry no gradient. What becomes of the terms (weights,
denominators, masks) is `aggregation`; a mismatch weight w_t multiplies the term and never the ratio.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from asyppo_async.algorithms.mismatch import LOG_RATIO_LIMIT
from asyppo_async.algorithms.packed import compute_dtype, neutralise


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Terms with gradient, and which tokens the trust region acted on."""

    terms: Tensor
    """[T]"""
    clipped_low: Tensor
    """[T] bool, no gradient: acted on at the lower bound."""
    clipped_high: Tensor
    """[T] bool, no gradient: acted on at the upper bound."""


def policy_log_ratio(
    policy_logprobs: Tensor, reference_logprobs: Tensor, keep: Tensor | None = None
) -> Tensor:
    """log pi_theta - log reference per token, [T], gradient to the policy only.

    Where `keep` is false the result is 0 and so is its gradient, whatever the logs hold there.

    Args:
        policy_logprobs: [T] of the current mini-batch.
        reference_logprobs: [T] proximal (or behaviour, for two-policy losses).
        keep: [T] bool or None.
    """
    dtype = compute_dtype(policy_logprobs, reference_logprobs)
    return neutralise(policy_logprobs.to(dtype) - reference_logprobs.detach().to(dtype), keep)


def policy_ratio(log_ratio: Tensor) -> Tensor:
    """exp of the log ratio with gradient; beyond +-20 it is constant."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def ppo_clip(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLoss:
    """-min(r A, clamp(r, 1 - clip_low, 1 + clip_high) A), [T].

    PPO (1707.06347) with equal bounds, clip-higher (DAPO 2503.14476) with .2 and .28.

    Args:
        log_ratio: [T] with gradient, from `policy_log_ratio`.
        advantages: [T].
        clip_low: eps_l.
        clip_high: eps_h.
        dual_clip: c > 1 bounds the term of a negative advantage by -c A (Ye et al., 1912.09729); None is off.
    """
    advantages = advantages.detach()
    ratio = policy_ratio(log_ratio)
    terms = torch.maximum(-ratio * advantages, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    clipped_low = (advantages < 0) & (ratio.detach() < 1 - clip_low)
    clipped_high = (advantages > 0) & (ratio.detach() > 1 + clip_high)
    if dual_clip is not None:
        if dual_clip <= 1:
            raise ValueError(f"dual_clip must be above 1, got {dual_clip}")
        capped = (advantages < 0) & (ratio.detach() > dual_clip)
        terms = torch.where(capped, -dual_clip * advantages, terms)
        clipped_high = clipped_high | capped
    return TokenLoss(terms=terms, clipped_low=clipped_low, clipped_high=clipped_high)


def entropy_bonus(entropies: Tensor, coefficient: float) -> Tensor:
    """-coefficient * H per token, [T]: the term that is added to the loss, before the entropy filter."""
    return -coefficient * entropies
