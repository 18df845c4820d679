"""One optimizer step made of the library's functions: decided on the whole batch, then summed over parts of it.

What the coordinator and the actor do between them, for every policy loss and in the dtype given, so that a
property of the step can be checked for all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from asyppo_async.algorithms.advantages import gae, length_adaptive_lambda
from asyppo_async.algorithms.aggregation import LossAggregation, aggregate, denominator, token_weights
from asyppo_async.algorithms.composition import entropy_coefficients, policy_coefficients
from asyppo_async.algorithms.critics import ensemble_value, value_std, value_std_masks
from asyppo_async.algorithms.losses import TokenLoss, entropy_bonus, policy_log_ratio
from asyppo_async.algorithms.mismatch import (
    MismatchCorrection,
    SequenceGate,
    TokenRule,
    TokenRuleKind,
    correct_mismatch,
)
from asyppo_async.algorithms.packed import neutralise, segment_mean, segment_sum, spread
from asyppo_async.algorithms.policy_losses import PPO, LossInputs, PolicyLoss, policy_loss
from asyppo_async.algorithms.sequence_losses import group_entropy, group_expectation_reference
from asyppo_async.algorithms.token_age import approximate_proximal
from asyppo_async.algorithms.token_classes import TokenMasks, classify_tokens, token_masks
from asyppo_async.algorithms.trust_masks import EntropyTracker, gepo_entropy_scale, m2po_keep, opsm_keep

F64 = torch.float64
LENGTHS = (5, 1, 0, 7, 3, 12, 2, 4)
MAX_LENGTH = 12
GATES = (SequenceGate(kind="max_log_ratio", high=1.2),)
TRACKER = EntropyTracker(mean=1.0, variance=0.04)


@dataclass(frozen=True, kw_only=True)
class Method:
    """A policy loss with what belongs to it."""

    loss: PolicyLoss = PPO
    clip_low: float = 0.2
    clip_high: float = 0.2
    rule: TokenRuleKind = "icepop_mask"
    reference: Literal["proximal", "behaviour", "a3po", "group_expectation"] = "proximal"
    opsm_threshold: float | None = None
    m2po: Literal["trust_region", "all"] | None = None
    group_entropy_scaling: bool = False
    advantage_per_response: bool = False


@dataclass(frozen=True)
class Batch:
    lengths: Tensor
    group_ids: Tensor
    rewards: Tensor
    versions: Tensor
    values: Tensor
    behaviour: Tensor
    proximal: Tensor
    policy: Tensor
    entropies: Tensor
    valid: Tensor


OF_TOKENS = ("values", "behaviour", "proximal", "policy", "entropies")
"""Numbers of tokens, which may be anything where a token has no say."""


def make_batch(
    seed: int,
    dtype: torch.dtype = F64,
    *,
    lengths: Sequence[int] = LENGTHS,
    num_holes: int = 0,
) -> Batch:
    """Responses of three groups; `num_holes` tokens anywhere are not the policy's."""
    generator = torch.Generator().manual_seed(seed)
    total, num = sum(lengths), len(lengths)
    behaviour = -torch.rand(total, generator=generator, dtype=F64) * 2
    proximal = behaviour + 0.4 * torch.randn(total, generator=generator, dtype=F64)
    policy = proximal + 0.2 * torch.randn(total, generator=generator, dtype=F64)
    rewards = torch.randint(0, 2, (num,), generator=generator).to(F64) * 2 - 1
    values = torch.randn(2, total, generator=generator, dtype=F64)
    entropies = torch.rand(total, generator=generator, dtype=F64)
    valid = torch.ones(total, dtype=torch.bool)
    valid[torch.randperm(total, generator=generator)[:num_holes]] = False
    versions = torch.randint(0, 4, (total,), generator=generator)
    group_ids = torch.randint(0, 3, (num,), generator=generator)
    columns = [column.to(dtype) for column in (rewards, values, behaviour, proximal, policy, entropies)]
    rewards, *others = columns
    return Batch(torch.tensor(lengths, dtype=torch.int64), group_ids, rewards, versions, *others, valid)


def spoiled(batch: Batch, where: Tensor, fill: float) -> Batch:
    """The batch with `fill` in every number of the tokens `where`, [T] bool."""
    changed = {name: torch.where(where, fill, getattr(batch, name)) for name in OF_TOKENS}
    return replace(batch, **changed)


def rearranged(batch: Batch, order: Sequence[int], padding: int, fill: float) -> Batch:
    """Responses in another order, each followed by invalid tokens that hold `fill`."""

    def move(column: Tensor, filling: float) -> Tensor:
        parts = column.split(batch.lengths.tolist(), dim=-1)
        pad = torch.full((*column.shape[:-1], padding), filling, dtype=column.dtype)
        return torch.cat([torch.cat([parts[index], pad], -1) for index in order], -1)

    index = torch.tensor(order)
    return Batch(
        batch.lengths[index] + padding,
        batch.group_ids[index],
        batch.rewards[index],
        move(batch.versions, 0),
        *(move(getattr(batch, name), fill) for name in OF_TOKENS),
        move(batch.valid, False),
    )


def with_masked_responses(batch: Batch, lengths: Sequence[int], groups: Sequence[int], fill: float) -> Batch:
    """The batch with responses appended of which nothing is valid and everything is `fill`."""
    num, added = len(lengths), sum(lengths)

    def grown(column: Tensor, filling: float, size: int) -> Tensor:
        return torch.cat([column, torch.full((*column.shape[:-1], size), filling, dtype=column.dtype)], -1)

    return Batch(
        torch.cat([batch.lengths, torch.tensor(lengths, dtype=torch.int64)]),
        torch.cat([batch.group_ids, torch.tensor(groups, dtype=torch.int64)]),
        grown(batch.rewards, 1.0, num),
        grown(batch.versions, 0, added),
        *(grown(getattr(batch, name), fill, added) for name in OF_TOKENS),
        grown(batch.valid, False, added),
    )


@dataclass(frozen=True)
class Decisions:
    """What a part of the batch is told about each of its tokens."""

    advantages: Tensor
    reference: Tensor
    policy: Tensor
    """Coefficient of the loss's term, without the share of the aggregation."""
    entropy: Tensor
    counted: Tensor
    """Tokens that a loss of whole responses reads."""
    masks: TokenMasks


def decide(batch: Batch, method: Method) -> Decisions:
    proximal = batch.proximal
    if method.reference == "a3po":
        proximal = approximate_proximal(batch.behaviour, proximal, batch.versions, 3)
    correction = correct_mismatch(
        proximal,
        batch.behaviour,
        batch.lengths,
        rule=TokenRule(kind=method.rule, low=0.5, high=5.0),
        gates=GATES,
        valid=batch.valid,
    )
    advantages = _advantages(batch, method, proximal, correction.measured)
    keep_sequences, keep_tokens = _trust_masks(batch, method, correction, advantages)
    classes = classify_tokens(
        batch.lengths, valid=batch.valid, keep_sequences=keep_sequences, keep_tokens=keep_tokens
    )
    masks = token_masks(classes)
    selection = value_std_masks(
        value_std(batch.values), advantage_share=0.2, entropy_share=0.2, valid=masks.ranking
    )
    reference = proximal
    if method.reference == "behaviour":
        reference = batch.behaviour
    elif method.reference == "group_expectation":
        reference = group_expectation_reference(
            batch.behaviour,
            batch.lengths,
            batch.group_ids,
            correction.measured,
            length_normalised=method.loss.length_normalised,
        ).to(batch.behaviour.dtype)
    return Decisions(
        advantages=advantages,
        reference=reference,
        policy=policy_coefficients(masks, correction.weights, selection.advantage_keep),
        entropy=entropy_coefficients(masks, selection.entropy_keep),
        counted=masks.denominator & correction.measured,
        masks=masks,
    )


def _advantages(batch: Batch, method: Method, proximal: Tensor, measured: Tensor) -> Tensor:
    if method.advantage_per_response:
        advantages = spread(batch.rewards * (1 + batch.group_ids / 8), batch.lengths)
    else:
        lambdas = length_adaptive_lambda(segment_sum(batch.valid, batch.lengths).long(), 1.5)
        values = ensemble_value(batch.values)
        advantages = gae(batch.rewards, values, batch.lengths, lambdas, action_mask=batch.valid)
    if method.group_entropy_scaling:
        entropies = group_entropy(proximal, batch.lengths, batch.group_ids, measured)
        advantages = gepo_entropy_scale(
            advantages,
            spread(entropies, batch.lengths).to(advantages.dtype),
            TRACKER,
            low_width=0.2,
            high_width=0.3,
            low_factor=0.5,
            high_factor=0.2,
        )
    return advantages.to(batch.policy.dtype)


def _trust_masks(
    batch: Batch, method: Method, correction: MismatchCorrection, advantages: Tensor
) -> tuple[Tensor, Tensor]:
    keep_sequences, keep_tokens = correction.keep_sequences, correction.keep_tokens
    if method.opsm_threshold is not None:
        keep_sequences = keep_sequences & opsm_keep(
            segment_mean(advantages, batch.lengths, batch.valid),
            correction.log_ratio,
            batch.lengths,
            threshold=method.opsm_threshold,
            valid=correction.measured,
        )
    if method.m2po is not None:
        keep_tokens = keep_tokens & m2po_keep(
            correction.log_ratio,
            threshold=0.04,
            advantages=advantages,
            candidates=method.m2po,
            strict=method.m2po == "all",
            valid=correction.measured,
        )
    return keep_sequences, keep_tokens


def terms_of(
    method: Method, policy: Tensor, decisions: Decisions, index: Tensor, lengths: Tensor
) -> TokenLoss:
    """The loss's terms of the tokens `index`, which are whole responses; only what has a say is read."""
    acted = decisions.policy[index] != 0
    counted = decisions.counted[index] if method.loss.of_whole_responses else acted
    reference = decisions.reference[index]
    inputs = LossInputs(
        policy_logprobs=neutralise(policy, acted),
        reference_logprobs=neutralise(reference, acted),
        log_ratio=policy_log_ratio(policy, reference, acted | counted),
        advantages=neutralise(decisions.advantages[index], acted),
        lengths=lengths,
        counted=counted,
    )
    return policy_loss(method.loss, inputs, clip_low=method.clip_low, clip_high=method.clip_high)


def loss_of_part(
    batch: Batch,
    method: Method,
    decisions: Decisions,
    rows: Sequence[int],
    mode: LossAggregation,
    total: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, its tokens, their gradient) of some responses."""
    starts = (batch.lengths.cumsum(0) - batch.lengths).tolist()
    ranges = [torch.arange(starts[row], starts[row] + int(batch.lengths[row])) for row in rows]
    index = torch.cat([torch.zeros(0, dtype=torch.int64), *ranges])
    lengths = batch.lengths[list(rows)]
    policy = batch.policy[index].clone().requires_grad_()
    terms = terms_of(method, policy, decisions, index, lengths).terms
    weights = token_weights(mode, lengths, decisions.masks.denominator[index], dtype=policy.dtype)
    loss = aggregate(terms, weights * decisions.policy[index], total)
    bonus = entropy_bonus(batch.entropies[index], 0.01)
    loss = loss + aggregate(bonus, weights * decisions.entropy[index], total)
    loss.backward()
    assert policy.grad is not None
    return loss.detach(), index, policy.grad


def sum_of_parts(
    batch: Batch, method: Method, decisions: Decisions, mode: LossAggregation, parts: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """(loss, gradient [T]) of a step over these parts, with the denominators of the whole."""
    masks = decisions.masks
    total = denominator(mode, batch.lengths, masks.denominator, max_length=MAX_LENGTH)
    gradient = torch.zeros_like(batch.policy)
    loss = torch.zeros((), dtype=batch.policy.dtype)
    for rows in parts:
        value, index, slopes = loss_of_part(batch, method, decisions, rows, mode, total)
        loss, gradient[index] = loss + value, slopes
    return loss, gradient


def step(
    batch: Batch, method: Method, mode: LossAggregation, parts: Sequence[Sequence[int]] | None = None
) -> tuple[Tensor, Tensor]:
    """(loss, gradient [T]); None: in one part."""
    whole = parts or [range(len(batch.lengths))]
    return sum_of_parts(batch, method, decide(batch, method), mode, whole)
