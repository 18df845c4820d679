"""How per-token terms become one loss: a weight per token and one global denominator.

    loss = sum over tokens of (weight * term) / denominator

    token-mean               weight 1         denominator: counted tokens            DAPO, VAPO, CISPO, S3AC
    seq-mean-token-mean      weight 1/|o_i|   denominator: counted responses         PPO, GRPO, AsyPPO, GSPO
    seq-mean-token-sum       weight 1         denominator: counted responses         REINFORCE
    seq-mean-token-sum-norm  weight 1         denominator: responses * max_length    Dr.GRPO

|o_i| is the number of counted tokens of response i. A denominator belongs to one optimizer step: the sum over
all its micro-batches and ranks. Each is additive over responses, so it may be summed over parts, never
averaged.

Legend: `B` responses, `T` packed tokens.
"""

from typing import Literal

import torch
from torch import Tensor

from asyppo_async.algorithms.packed import check_lengths, segment_sum, spread

LossAggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]
MODES: tuple[LossAggregation, ...] = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)


def counted_tokens(lengths: Tensor, counted: Tensor | None = None) -> Tensor:
    """|o_i|: counted tokens of each response, [B] int64."""
    return lengths.to(torch.int64) if counted is None else segment_sum(counted, lengths).to(torch.int64)


def token_weights(
    mode: LossAggregation,
    lengths: Tensor,
    counted: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weight of each token's term, [T]; 0 for a token that is not counted.

    Args:
        mode: see the module.
        lengths: [B].
        counted: [T] bool, the tokens of the denominator (`TokenMasks.denominator`); None means all.
        dtype: of the result.
    """
    _check_mode(mode)
    num_tokens = int(lengths.sum()) if counted is None else len(counted)
    check_lengths(lengths, num_tokens)
    if mode == "seq-mean-token-mean":
        per_response = 1.0 / counted_tokens(lengths, counted).clamp(min=1).double()
        weights = spread(per_response.to(dtype), lengths)
    else:
        weights = torch.ones(num_tokens, dtype=dtype)
    return weights if counted is None else torch.where(counted, weights, 0.0)


def denominator(
    mode: LossAggregation,
    lengths: Tensor,
    counted: Tensor | None = None,
    *,
    max_length: int | None = None,
    responses_counted: Tensor | None = None,
) -> float:
    """The number that the weighted sum is divided by; 0 if nothing is counted, and then there is no step to
    take.

    Args:
        mode: see the module.
        lengths: [B].
        counted: [T] bool, the tokens of the denominator; None means all.
        max_length: longest possible response, for seq-mean-token-sum-norm only.
        responses_counted: [T] bool, which tokens make their response count, if other than `counted`: under
            renormalisation by kept tokens a response whose tokens are all rejected still counts as one.
    """
    presence = counted if responses_counted is None else responses_counted
    return denominator_of_counts(
        mode, counted_tokens(lengths, counted), counted_tokens(lengths, presence), max_length=max_length
    )


def denominator_of_counts(
    mode: LossAggregation, tokens: Tensor, present: Tensor, *, max_length: int | None = None
) -> float:
    """`denominator` from counts per response, for many subsets of one batch.

    Args:
        mode: see the module.
        tokens: [B] int64, counted tokens.
        present: [B] int64, tokens that make their response count.
        max_length: as there.
    """
    _check_mode(mode)
    if mode == "token-mean":
        return float(tokens.sum())
    responses = float((present > 0).sum())
    if mode != "seq-mean-token-sum-norm":
        return responses
    if max_length is None or max_length < 1:
        raise ValueError(
            f"seq-mean-token-sum-norm needs max_length, the longest possible response; got {max_length}"
        )
    return responses * max_length


def aggregate(terms: Tensor, weights: Tensor, denominator_: float) -> Tensor:
    """sum(weights * terms) / denominator as a scalar with gradient; 0 if the denominator is 0.

    A term whose weight is 0 is left out, also when it is NaN. (For its gradient to be 0 as well, what the
    term was made from must have been neutralised: `packed.neutralise`, `losses.policy_log_ratio`.)
    """
    included = torch.where(weights != 0, terms, torch.zeros_like(terms)) * weights
    total = included.sum()
    return total / denominator_ if denominator_ > 0 else total * 0.0


def _check_mode(mode: LossAggregation) -> None:
    if mode not in MODES:
        raise ValueError(f"the loss is aggregated by one of {', '.join(MODES)}; got {mode!r}")
