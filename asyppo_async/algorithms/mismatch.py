"""Correction of what sampler and trainer disagree about: rho = pi_old / mu, proximal over behaviour.

    mu      behaviour: what the engine sampled from
    pi_old  proximal: the trainer's forward at the start of the step
    log rho = log pi_old - log mu      in float32 (float64 when given), clamped to +-20 before exp

Bounds are inclusive and compared in log space with the dtype of the logs, on the *unclamped* log ratio. A log
ratio that is not finite rejects its token. Sequence gates look at all valid tokens with a finite ratio, not
at those that survive the token rule. Everything here is a constant of the step: no gradient, frozen for all
its epochs.

Legend: `B` responses, `T` packed tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Literal

import torch
from torch import Tensor

from asyppo_async.algorithms.packed import (
    check_lengths,
    compute_dtype,
    count_true,
    counted_any,
    neutralise,
    segment_max,
    segment_mean,
    segment_sum,
)

LOG_RATIO_LIMIT = 20.0

TokenRuleKind = Literal["none", "icepop", "icepop_mask", "truncate", "clamp", "importance", "kpop"]
SequenceGateKind = Literal["max_log_ratio", "max_ratio", "token_band", "product", "geometric", "binary_kl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRule:
    """What is done with a single token.

    none         keep, weight 1
    icepop       keep iff low <= rho <= high, weight rho     (IcePop paper, GLM-5, XTuner "both")
    icepop_mask  keep iff low <= rho <= high, weight 1       (S3AC)
    truncate     keep, weight min(rho, high)                 (TIS)
    clamp        keep, weight clamp(rho, low, high)
    importance   keep, weight rho
    kpop         keep iff the binary KL is below high in both directions, weight 1
    """

    kind: TokenRuleKind
    low: float = 0.0
    high: float = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceGate:
    """What keeps or rejects a whole response. Tests of the max gates are strict: a value on the bound is
    kept.

    max_log_ratio  rejected if max_t |log rho_t| > high               (S3AC's MIS, high 5)
    max_ratio      rejected if max_t rho_t > high                     (XTuner's reading of the same)
    token_band     rejected if any rho_t < low or > high              (verl and slime veto)
    product        kept iff low <= exp(sum_t log rho_t) <= high
    geometric      kept iff low <= exp(mean_t log rho_t) <= high
    binary_kl      kept iff mean_t KL_bin(mu_t || pi_t) <= high       (FlashREINFORCE, high 3e-3)
    """

    kind: SequenceGateKind
    low: float = 0.0
    high: float = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchCounts:
    """Over valid tokens, before any rejection."""

    num_tokens: int
    num_non_finite: int
    num_below: int
    """Tokens with rho under the rule's low bound (rejected by IcePoP, lifted by clamp)."""
    num_above: int
    num_rejected_tokens: int
    """By the token rule, not finite ones included."""
    num_sequences: int
    """Responses with at least one valid token."""
    num_rejected_sequences: int
    rejected_by_gate: tuple[int, ...]
    """Responses that each gate rejects, in the order of the gates; one response may fall to several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchCorrection:
    """The masks and weights of one batch."""

    log_ratio: Tensor
    """[T] log rho, unclamped; 0 where invalid or not finite."""
    measured: Tensor
    """[T] bool, valid and finite: what ratio statistics are taken over."""
    keep_tokens: Tensor
    """[T] bool, by the token rule; false where invalid or not finite."""
    keep_sequences: Tensor
    """[B] bool, by all gates; a response without valid tokens is kept."""
    weights: Tensor
    """[T] w_t of the token rule; 0 where not kept by it."""
    counts: MismatchCounts


def log_ratio(numerator_logprobs: Tensor, denominator_logprobs: Tensor) -> Tensor:
    """log(numerator / denominator) per token, [T], float32 or float64 when given, not clamped."""
    dtype = compute_dtype(numerator_logprobs, denominator_logprobs)
    return numerator_logprobs.to(dtype) - denominator_logprobs.to(dtype)


def ratio(log_ratios: Tensor) -> Tensor:
    """exp of the log ratio, clamped to +-20 first."""
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def safe_log(bound: float) -> float:
    """log of a bound on a ratio, -inf for 0 and inf for inf."""
    if bound < 0:
        raise ValueError(f"a bound on a ratio must be at least 0, got {bound}")
    return -torch.inf if bound == 0 else log(bound)


def inside_band(log_ratios: Tensor, low: float, high: float) -> Tensor:
    """low <= rho <= high, [T] bool; compared in log space with bounds rounded to the dtype of the logs."""
    if not low <= high:
        raise ValueError(f"a band needs low <= high, got [{low}, {high}]")
    bounds = torch.tensor([safe_log(low), safe_log(high)], dtype=log_ratios.dtype)
    # NaN is inside nothing, also where a side has no bound.
    above = log_ratios >= bounds[0]
    if high == float("inf"):
        return above
    below = log_ratios <= bounds[1]
    return below if low == 0 else above & below


def strictly_inside_band(log_ratios: Tensor, low: float, high: float) -> Tensor:
    """low < rho < high, [T] bool; DIS, whose bounds are strict."""
    bounds = torch.tensor([safe_log(low), safe_log(high)], dtype=log_ratios.dtype)
    return (log_ratios > bounds[0]) & (log_ratios < bounds[1])


def binary_kl(p_logprobs: Tensor, q_logprobs: Tensor) -> Tensor:
    """KL of two coins that show the sampled token or another, [T]: p log(p/q) + (1-p) log((1-p)/(1-q))."""
    dtype = compute_dtype(p_logprobs, q_logprobs)
    p_log, q_log = (logs.to(dtype).clamp(max=-torch.finfo(dtype).eps) for logs in (p_logprobs, q_logprobs))
    p_other, q_other = -torch.expm1(p_log), -torch.expm1(q_log)
    return p_log.exp() * (p_log - q_log) + p_other * (p_other.log() - q_other.log())


def apply_token_rule(
    log_ratios: Tensor,
    rule: TokenRule,
    *,
    proximal_logprobs: Tensor | None = None,
    behaviour_logprobs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(keep [T] bool, weight [T]) of a token rule on finite log ratios; only kpop needs the log-probs."""
    keep = torch.ones_like(log_ratios, dtype=torch.bool)
    ones = torch.ones_like(log_ratios)
    match rule.kind:
        case "none":
            return keep, ones
        case "icepop" | "icepop_mask":
            keep = inside_band(log_ratios, rule.low, rule.high)
            weights = ratio(log_ratios) if rule.kind == "icepop" else ones
            return keep, torch.where(keep, weights, 0.0)
        case "truncate":
            return keep, ratio(log_ratios).clamp(max=rule.high)
        case "clamp":
            return keep, ratio(log_ratios).clamp(rule.low, rule.high)
        case "importance":
            return keep, ratio(log_ratios)
        case "kpop":
            if proximal_logprobs is None or behaviour_logprobs is None:
                raise ValueError("the kpop rule needs the proximal and the behaviour log-probs, got None")
            divergence = torch.maximum(
                binary_kl(proximal_logprobs, behaviour_logprobs),
                binary_kl(behaviour_logprobs, proximal_logprobs),
            )
            keep = divergence < rule.high
            return keep, keep.to(log_ratios.dtype)
    raise ValueError(f"unknown token rule {rule.kind!r}")


def apply_sequence_gate(
    log_ratios: Tensor,
    lengths: Tensor,
    gate: SequenceGate,
    *,
    measured: Tensor | None = None,
    proximal_logprobs: Tensor | None = None,
    behaviour_logprobs: Tensor | None = None,
) -> Tensor:
    """Which responses a gate keeps, [B] bool, from the unclamped ratios of their measured tokens."""
    if measured is None:
        measured = torch.ones_like(log_ratios, dtype=torch.bool)
    empty = ~counted_any(measured, lengths)
    log_ratios = neutralise(log_ratios, measured)
    match gate.kind:
        case "max_log_ratio":
            return segment_max(log_ratios.abs(), lengths) <= gate.high
        case "max_ratio":
            bounded = neutralise(log_ratios, measured, -torch.inf)
            return inside_band(segment_max(bounded, lengths), 0.0, gate.high)
        case "token_band":
            outside = measured & ~inside_band(log_ratios, gate.low, gate.high)
            return ~counted_any(outside, lengths)
        case "product":
            return inside_band(segment_sum(log_ratios.double(), lengths), gate.low, gate.high) | empty
        case "geometric":
            mean = segment_mean(log_ratios.double(), lengths, measured)
            return inside_band(mean, gate.low, gate.high) | empty
        case "binary_kl":
            if proximal_logprobs is None or behaviour_logprobs is None:
                raise ValueError(
                    "the binary_kl gate needs the proximal and the behaviour log-probs, got None"
                )
            divergence = binary_kl(
                neutralise(behaviour_logprobs, measured, -1.0), neutralise(proximal_logprobs, measured, -1.0)
            )
            return segment_mean(divergence, lengths, measured) <= gate.high
    raise ValueError(f"unknown sequence gate {gate.kind!r}")


def correct_mismatch(
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    lengths: Tensor,
    *,
    rule: TokenRule,
    gates: Sequence[SequenceGate] = (),
    valid: Tensor | None = None,
) -> MismatchCorrection:
    """Masks, weights and counters of one batch.

    Args:
        proximal_logprobs: [T] of the trainer, at the start of the step.
        behaviour_logprobs: [T] of the engine.
        lengths: [B].
        rule: for single tokens.
        gates: for whole responses; a response must pass all.
        valid: [T] bool; what is false may hold NaN and changes nothing. None means all.
    """
    check_lengths(lengths, len(proximal_logprobs))
    if valid is None:
        valid = torch.ones_like(proximal_logprobs, dtype=torch.bool)
    raw = log_ratio(proximal_logprobs.detach(), behaviour_logprobs.detach())
    measured = valid & torch.isfinite(raw)
    logs = neutralise(raw, measured)
    proximal = behaviour = None
    if rule.kind == "kpop" or any(gate.kind == "binary_kl" for gate in gates):
        proximal = neutralise(proximal_logprobs.detach(), measured, -1.0)
        behaviour = neutralise(behaviour_logprobs.detach(), measured, -1.0)
    kept, weights = apply_token_rule(logs, rule, proximal_logprobs=proximal, behaviour_logprobs=behaviour)
    keep_tokens = kept & measured
    verdicts = [
        apply_sequence_gate(
            logs, lengths, gate, measured=measured, proximal_logprobs=proximal, behaviour_logprobs=behaviour
        )
        for gate in gates
    ]
    keep_sequences = torch.ones(len(lengths), dtype=torch.bool)
    for verdict in verdicts:
        keep_sequences &= verdict
    num_tokens, num_finite = count_true(valid), count_true(measured)
    below = measured & ~inside_band(logs, rule.low, float("inf"))
    above = measured & ~(kept if rule.kind == "kpop" else inside_band(logs, 0.0, rule.high))
    return MismatchCorrection(
        log_ratio=logs,
        measured=measured,
        keep_tokens=keep_tokens,
        keep_sequences=keep_sequences,
        weights=neutralise(weights, keep_tokens),
        counts=MismatchCounts(
            num_tokens=num_tokens,
            num_non_finite=num_tokens - num_finite,
            num_below=count_true(below),
            num_above=count_true(above),
            num_rejected_tokens=num_tokens - count_true(keep_tokens),
            num_sequences=count_true(counted_any(valid, lengths)),
            num_rejected_sequences=count_true(~keep_sequences),
            rejected_by_gate=tuple(count_true(~verdict) for verdict in verdicts),
        ),
    )
