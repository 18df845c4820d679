"""Losses that weight grad log pi by a detached coefficient: REINFORCE, CISPO, DIS, TOPR, ASPO, DPPO.

Each says its coefficient c: d loss / d log pi = -c A. Legend: `B` responses, `T` packed tokens. "u" is the
ratio to the behaviour policy, "r" the ratio to the proximal one; which one a loss is given is the caller's
choice (and `composition.check_ratio_use` refuses the combination that counts the mismatch twice).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyppo_async.algorithms.losses import TokenLoss, policy_ratio
from asyppo_async.algorithms.mismatch import ratio, strictly_inside_band
from asyppo_async.algorithms.packed import segment_sum, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioBounds:
    """Where CISPO clamps its weight, as bounds on the ratio itself. None is no bound."""

    low: float | None
    high: float | None

    @classmethod
    def relative(cls, clip_low: float, clip_high: float) -> "RatioBounds":
        """[1 - eps_l, 1 + eps_h]: verl, slime, ROLL; S3AC with .2 and .28."""
        return cls(low=1 - clip_low, high=1 + clip_high)

    @classmethod
    def upper_only(cls, clip_high: float) -> "RatioBounds":
        """[-, 1 + eps_h]: MiniMax-M1 2506.13585."""
        return cls(low=None, high=1 + clip_high)

    @classmethod
    def absolute(cls, maximum: float) -> "RatioBounds":
        """[-, maximum]: TRL with 5."""
        return cls(low=None, high=maximum)


def _no_flags(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool)


def reinforce(policy_logprobs: Tensor, advantages: Tensor) -> TokenLoss:
    """-A log pi, [T]; c = 1. With weight rho: FlashREINFORCE."""
    terms = -advantages.detach() * policy_logprobs
    return TokenLoss(terms=terms, clipped_low=_no_flags(terms), clipped_high=_no_flags(terms))


def cispo(
    policy_logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    bounds: RatioBounds,
    unified_mask: tuple[float, float] | None = None,
) -> TokenLoss:
    """-sg(clamp(r, bounds)) A log pi, [T]; c = clamp(r). Never zeroes a gradient by the clamp.

    Args:
        policy_logprobs: [T] with gradient.
        log_ratio: [T]; no gradient is taken through it.
        advantages: [T].
        bounds: of the weight; the flags say where it was clamped.
        unified_mask: (eps_l, eps_h) drops a token where PPO's clip would (A > 0 and r > 1 + eps_h, A < 0 and
            r < 1 - eps_l; MiniMax-M1's unified form); None is off.
    """
    advantages = advantages.detach()
    weights = ratio(log_ratio.detach())
    below = weights < bounds.low if bounds.low is not None else _no_flags(weights)
    above = weights > bounds.high if bounds.high is not None else _no_flags(weights)
    if bounds.low is not None or bounds.high is not None:
        weights = weights.clamp(bounds.low, bounds.high)
    if unified_mask is not None:
        raw = ratio(log_ratio.detach())
        outside = (advantages > 0) & (raw > 1 + unified_mask[1]) | (advantages < 0) & (
            raw < 1 - unified_mask[0]
        )
        weights = torch.where(outside, torch.zeros_like(weights), weights)
    return TokenLoss(terms=-weights * advantages * policy_logprobs, clipped_low=below, clipped_high=above)


def dis(
    policy_logprobs: Tensor,
    behaviour_log_ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """-sg(f(u)) A log pi with f(u) = u strictly inside (1 - eps_l, 1 + eps_h), else 0, [T]. (SAO 2607.07508:
    .3, 5.)

    A two-policy loss: u is over the behaviour policy, so no mismatch weight goes with it. The tokens it
    rejects stay in the denominator.
    """
    u_log = behaviour_log_ratio.detach()
    keep = strictly_inside_band(u_log, 1 - clip_low, 1 + clip_high)
    weights = torch.where(keep, ratio(u_log), torch.zeros_like(u_log))
    below = ~keep & (u_log < 0)
    return TokenLoss(
        terms=-weights * advantages.detach() * policy_logprobs, clipped_low=below, clipped_high=~keep & ~below
    )


def topr(
    policy_logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    level: Literal["token", "sequence"] = "token",
    lengths: Tensor | None = None,
) -> TokenLoss:
    """-c A log pi, [T]; c = 1 for A > 0, sg(clamp(ratio, 0, 1)) for A < 0. (TOPR 2503.14286.)

    Args:
        policy_logprobs: [T] with gradient.
        log_ratio: [T] to the behaviour policy; 0 on tokens that are not valid.
        advantages: [T].
        level: "token" as ROLL, "sequence" (the ratio of the whole response) as the paper; needs `lengths`.
        lengths: [B].
    """
    logs = log_ratio.detach()
    if level == "sequence":
        if lengths is None:
            raise ValueError("TOPR at level 'sequence' needs lengths, got None")
        logs = spread(segment_sum(logs, lengths), lengths)
    tapered = ratio(logs).clamp(max=1.0)
    weights = torch.where(advantages > 0, torch.ones_like(tapered), tapered)
    clipped = (advantages < 0) & (logs > 0)
    terms = -weights * advantages.detach() * policy_logprobs
    return TokenLoss(terms=terms, clipped_low=_no_flags(terms), clipped_high=clipped)


def aspo(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, maximum_weight: float
) -> TokenLoss:
    """The ratio of a positive advantage turned over, [T]. (ASPO 2510.06062.)

        A > 0: c = min(1 / r, maximum_weight), 0 if r > 1 + eps_h;     A < 0: c = r, 0 if r < 1 - eps_l

    The cap is soft, as in CISPO: it bounds the weight and keeps the gradient.

    Args:
        log_ratio: [T] with gradient.
        advantages: [T].
        clip_low: eps_l.
        clip_high: eps_h.
        maximum_weight: the dual clip of the turned ratio (3).
    """
    advantages = advantages.detach()
    r = policy_ratio(log_ratio)
    fixed = r.detach()
    turned = (1.0 / fixed).clamp(max=maximum_weight) * (log_ratio - log_ratio.detach()).exp()
    low, high = (advantages < 0) & (fixed < 1 - clip_low), (advantages > 0) & (fixed > 1 + clip_high)
    terms = -torch.where(advantages > 0, turned, r) * advantages
    terms = torch.where(low | high, torch.zeros_like(terms), terms)
    return TokenLoss(terms=terms, clipped_low=low, clipped_high=high)


def dppo(
    policy_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    *,
    mask_low: float,
    mask_high: float,
    kl_coefficient: float,
) -> TokenLoss:
    """A trust region in probability, not in ratio: -A u + kl (log u)^2, [T]. (DPPO as in prime-rl: .2, .2,
    1e-3.)

    The first part is dropped where pi - mu > mask_high for A > 0 or pi - mu < -mask_low for A < 0; the second
    is paid on all tokens.
    """
    advantages = advantages.detach()
    behaviour = behaviour_logprobs.detach()
    logs = policy_logprobs - behaviour
    difference = policy_logprobs.detach().exp() - behaviour.exp()
    low, high = (advantages < 0) & (difference < -mask_low), (advantages > 0) & (difference > mask_high)
    gain = torch.where(low | high, torch.zeros_like(logs), advantages * policy_ratio(logs))
    return TokenLoss(terms=-gain + kl_coefficient * logs.square(), clipped_low=low, clipped_high=high)
