"""Losses whose ratio belongs to a whole response: GSPO, GSPO-token, GEPO with group expectation.

Terms are per token and constant within a response where the loss is of the response, so the aggregation
seq-mean-token-mean gives the papers' mean over responses. Legend: `B` responses, `T` packed tokens.
"""

import torch
from torch import Tensor

from asyppo_async.algorithms.group_advantages import group_statistics
from asyppo_async.algorithms.losses import TokenLoss, policy_ratio, ppo_clip
from asyppo_async.algorithms.mismatch import ratio
from asyppo_async.algorithms.packed import counted_any, neutralise, segment_mean, segment_sum, spread


def gspo(
    log_ratio: Tensor,
    advantages: Tensor,
    lengths: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    counted: Tensor | None = None,
) -> TokenLoss:
    """-min(s A, clamp(s, 1 - eps_l, 1 + eps_h) A) with s = exp(mean_t log r_t), [T]. (GSPO 2507.18071: 3e-4,
    4e-4.)

    Args:
        log_ratio: [T] with gradient.
        advantages: [T], constant within each response.
        lengths: [B].
        clip_low: eps_l.
        clip_high: eps_h.
        counted: [T] bool, tokens that the mean is over (those of the denominator); None means all.
    """
    mean = spread(segment_mean(log_ratio, lengths, counted), lengths)
    return ppo_clip(mean, advantages, clip_low=clip_low, clip_high=clip_high)


def gspo_token(
    log_ratio: Tensor,
    advantages: Tensor,
    lengths: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    counted: Tensor | None = None,
) -> TokenLoss:
    """GSPO with an advantage per token: s_t = sg(s) pi_t / sg(pi_t), clipped by the value of s, [T]."""
    mean = spread(segment_mean(log_ratio.detach(), lengths, counted), lengths)
    return ppo_clip(
        mean + (log_ratio - log_ratio.detach()), advantages, clip_low=clip_low, clip_high=clip_high
    )


def group_expectation_weights(
    policy_sequence_logprobs: Tensor,
    behaviour_sequence_logprobs: Tensor,
    group_ids: Tensor,
    present: Tensor | None = None,
) -> Tensor:
    """w_i = p(y_i) / E_q[q] with E_q[q] = sum q^2 / sum q over the group, [B], gradient to p. (GEPO
    2508.17850.)

    Args:
        policy_sequence_logprobs: [B] log p(y_i), with gradient; sums over tokens, or means for the
            length-normalised form.
        behaviour_sequence_logprobs: [B] log q(y_i), taken alike.
        group_ids: [B].
        present: [B] bool, responses that have a token; None means all.
    """
    return policy_ratio(
        policy_sequence_logprobs - group_expectation_logs(behaviour_sequence_logprobs, group_ids, present)
    )


def group_expectation_logs(
    behaviour_sequence_logprobs: Tensor, group_ids: Tensor, present: Tensor | None = None
) -> Tensor:
    """log E_q[q] of each response's group, [B], no gradient; 0 for a group of which nothing is present.

    A response without tokens is not one of probability 1, which would outweigh all others: it must not be
    `present` ([B] bool). Computed from logs shifted by the group's largest, since probabilities of responses
    underflow.
    """
    q_log = behaviour_sequence_logprobs.detach()
    if present is not None:
        q_log = torch.where(present, q_log, -torch.inf)
    _, index = torch.unique(group_ids, return_inverse=True)
    num_groups = int(index.max()) + 1 if index.numel() else 0
    top = q_log.new_full((num_groups,), -torch.inf).scatter_reduce(0, index, q_log, "amax")
    top = torch.where(top > -torch.inf, top, 0.0)
    shifted = (q_log - top[index]).exp()
    sums = q_log.new_zeros(num_groups).index_add(0, index, shifted)
    squares = q_log.new_zeros(num_groups).index_add(0, index, shifted.square())
    expectation_log = torch.where(sums > 0, (squares / sums).log() + top, 0.0)
    return expectation_log[index]


def group_expectation_reference(
    behaviour_logprobs: Tensor,
    lengths: Tensor,
    group_ids: Tensor,
    counted: Tensor,
    *,
    length_normalised: bool = True,
) -> Tensor:
    """What `sequence_weighted` needs as reference to be `gepo_expectation`, [T], in float64, no gradient.

    log E_q[q] of the response's group at every token, so that the mean over its counted tokens gives it
    back; divided by their number where it is the sum that must.

    Args:
        behaviour_logprobs: [T]; may hold anything where not counted.
        lengths: [B].
        group_ids: [B].
        counted: [T] bool, tokens of the sequence probability.
        length_normalised: as in `gepo_expectation`.
    """
    tokens = segment_sum(counted, lengths)
    logs = segment_sum(neutralise(behaviour_logprobs.detach().double(), counted), lengths)
    if length_normalised:
        logs = logs / tokens.clamp(min=1)
    expectation = group_expectation_logs(logs, group_ids, tokens > 0)
    if not length_normalised:
        expectation = expectation / tokens.clamp(min=1)
    return spread(expectation, lengths)


def gepo_expectation(
    policy_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    lengths: Tensor,
    group_ids: Tensor,
    *,
    counted: Tensor | None = None,
    length_normalised: bool = True,
) -> TokenLoss:
    """-w_i A_i, [T], with the weights of `group_expectation_weights`; no clip.

    Args:
        policy_logprobs: [T] with gradient.
        behaviour_logprobs: [T].
        advantages: [T], constant within each response.
        lengths: [B].
        group_ids: [B].
        counted: [T] bool, tokens of the sequence probability; None means all.
        length_normalised: geometric mean per token instead of the product, which over- or underflows on long
            responses.
    """
    if counted is None:
        counted = torch.ones_like(policy_logprobs, dtype=torch.bool)
    sums = (
        segment_mean(logs, lengths, counted)
        if length_normalised
        else segment_sum(torch.where(counted, logs, torch.zeros_like(logs)), lengths)
        for logs in (policy_logprobs, behaviour_logprobs.detach())
    )
    present = counted_any(counted, lengths)
    weights = spread(group_expectation_weights(next(sums), next(sums), group_ids, present), lengths)
    terms = -weights * advantages.detach()
    flags = torch.zeros_like(terms, dtype=torch.bool)
    return TokenLoss(terms=terms, clipped_low=flags, clipped_high=flags)


def sequence_weighted(
    log_ratio: Tensor,
    advantages: Tensor,
    lengths: Tensor,
    *,
    counted: Tensor | None = None,
    length_normalised: bool = True,
) -> TokenLoss:
    """-s A with s = exp of the mean (or sum) of the response's log ratios, [T]; no clip.

    With log E_q[q] in place of the reference at every token (divided by |o_i| for the sum) this is
    `gepo_expectation`: what needs the whole group is then a constant that each response brings along.
    """
    if counted is not None:
        log_ratio = torch.where(counted, log_ratio, torch.zeros_like(log_ratio))
    logs = segment_mean(log_ratio, lengths, counted) if length_normalised else segment_sum(log_ratio, lengths)
    terms = -spread(policy_ratio(logs), lengths) * advantages.detach()
    flags = torch.zeros_like(terms, dtype=torch.bool)
    return TokenLoss(terms=terms, clipped_low=flags, clipped_high=flags)


def sequence_ratio(log_ratio: Tensor, lengths: Tensor, counted: Tensor | None = None) -> Tensor:
    """exp(mean_t log r_t) per response, [B], no gradient."""
    return ratio(segment_mean(log_ratio.detach(), lengths, counted))


def group_entropy(
    policy_logprobs: Tensor, lengths: Tensor, group_ids: Tensor, counted: Tensor | None = None
) -> Tensor:
    """H_g = -(sum of log pi over the group's tokens) / (number of them), [B]; 0 for a group without tokens."""
    logs = policy_logprobs.detach().double()
    if counted is None:
        counted = torch.ones_like(logs, dtype=torch.bool)
    surprise = segment_sum(torch.where(counted, -logs, torch.zeros_like(logs)), lengths)
    tokens = segment_sum(counted, lengths)
    return group_statistics(surprise, group_ids).mean / group_statistics(tokens, group_ids).mean.clamp(
        min=1e-300
    )
