"""One description for every policy loss, and the function that it means.

Legend: `B` responses, `T` packed tokens. The reference is the proximal policy, or for a two-policy loss the
behaviour policy (then r is u).
"""

from dataclasses import dataclass
from typing import Literal, assert_never

from torch import Tensor

from asyppo_async.algorithms.losses import TokenLoss, ppo_clip
from asyppo_async.algorithms.sequence_losses import gspo, gspo_token, sequence_weighted
from asyppo_async.algorithms.weighted_losses import RatioBounds, aspo, cispo, dis, dppo, reinforce, topr

LossKind = Literal[
    "ppo",
    "cispo",
    "dis",
    "gspo",
    "gspo_token",
    "aspo",
    "topr",
    "dppo",
    "reinforce",
    "gepo_expectation",
]
BoundsKind = Literal["relative", "upper_only", "absolute"]
WHOLE_RESPONSES: tuple[LossKind, ...] = ("gspo", "gspo_token", "gepo_expectation")
"""Their ratio belongs to a whole response, so all its tokens must be at hand; `topr` at level "sequence" too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Which loss, and those of its numbers that are not the two clip bounds."""

    kind: LossKind = "ppo"
    dual_clip: float | None = None
    """Of ppo, and the cap of aspo."""
    bounds: BoundsKind = "relative"
    """Of cispo."""
    unified_mask: bool = False
    """Of cispo."""
    level: Literal["token", "sequence"] = "token"
    """Of topr."""
    kl_coefficient: float = 1e-3
    """Of dppo's own penalty."""
    length_normalised: bool = True
    """Of gepo_expectation."""

    @property
    def of_whole_responses(self) -> bool:
        return self.kind in WHOLE_RESPONSES or (self.kind == "topr" and self.level == "sequence")


PPO = PolicyLoss()


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What a loss may read."""

    policy_logprobs: Tensor
    """[T] with gradient."""
    reference_logprobs: Tensor
    """[T]"""
    log_ratio: Tensor
    """[T] of the two, with gradient; 0 on tokens that have no say."""
    advantages: Tensor
    """[T]"""
    lengths: Tensor
    """[B] of the responses; read by losses of whole responses only."""
    counted: Tensor
    """[T] bool, tokens that the mean over a response is taken over."""


def policy_loss(loss: PolicyLoss, inputs: LossInputs, *, clip_low: float, clip_high: float) -> TokenLoss:
    """The terms of `loss`, [T]; see the function of the same name for each kind."""
    log_ratio, advantages = inputs.log_ratio, inputs.advantages
    clips = {"clip_low": clip_low, "clip_high": clip_high}
    match loss.kind:
        case "ppo":
            terms = ppo_clip(
                log_ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=loss.dual_clip
            )
        case "cispo":
            terms = cispo(
                inputs.policy_logprobs,
                log_ratio,
                advantages,
                bounds=_bounds(loss.bounds, clip_low, clip_high),
                unified_mask=(clip_low, clip_high) if loss.unified_mask else None,
            )
        case "dis":
            terms = dis(inputs.policy_logprobs, log_ratio, advantages, **clips)
        case "gspo":
            terms = gspo(log_ratio, advantages, inputs.lengths, **clips, counted=inputs.counted)
        case "gspo_token":
            terms = gspo_token(log_ratio, advantages, inputs.lengths, **clips, counted=inputs.counted)
        case "aspo":
            if loss.dual_clip is None:
                raise ValueError("aspo caps the turned ratio by dual_clip, got None")
            terms = aspo(log_ratio, advantages, **clips, maximum_weight=loss.dual_clip)
        case "topr":
            terms = topr(
                inputs.policy_logprobs, log_ratio, advantages, level=loss.level, lengths=inputs.lengths
            )
        case "dppo":
            terms = dppo(
                inputs.policy_logprobs,
                inputs.reference_logprobs,
                advantages,
                mask_low=clip_low,
                mask_high=clip_high,
                kl_coefficient=loss.kl_coefficient,
            )
        case "reinforce":
            terms = reinforce(inputs.policy_logprobs, advantages)
        case "gepo_expectation":
            terms = sequence_weighted(
                log_ratio,
                advantages,
                inputs.lengths,
                counted=inputs.counted,
                length_normalised=loss.length_normalised,
            )
        case _:
            assert_never(loss.kind)
    return terms


def _bounds(kind: BoundsKind, clip_low: float, clip_high: float) -> RatioBounds:
    if kind == "relative":
        return RatioBounds.relative(clip_low, clip_high)
    return RatioBounds.upper_only(clip_high) if kind == "upper_only" else RatioBounds.absolute(clip_high)
