"""Packed tensors: the tokens of a batch's responses laid end to end.

Legend: `B` responses, `T` tokens of all responses together. `lengths` is [B] int64 and sums to `T`; a
response may be empty.
"""

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 as soon as one of the tensors is float64, float32 otherwise."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def check_lengths(lengths: Tensor, num_tokens: int) -> None:
    """Raise `ValueError` unless `lengths` is a [B] integer tensor that sums to `num_tokens`."""
    if lengths.dim() != 1 or lengths.is_floating_point():
        raise ValueError(f"lengths must be [B] integers, got {list(lengths.shape)} {lengths.dtype}")
    total = int(lengths.sum())
    if total != num_tokens:
        raise ValueError(
            f"lengths sum to {total} but the packed tensor holds {num_tokens} tokens; pack both alike"
        )


def segment_ids(lengths: Tensor) -> Tensor:
    """Index of the response that each token belongs to, [T] int64."""
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def segment_starts(lengths: Tensor) -> Tensor:
    """Flat index of the first token of each response, [B] int64."""
    return lengths.cumsum(0) - lengths


def spread(per_response: Tensor, lengths: Tensor) -> Tensor:
    """Repeat a value per response over its tokens, [B] -> [T]."""
    return torch.repeat_interleave(per_response, lengths)


def segment_sum(terms: Tensor, lengths: Tensor) -> Tensor:
    """Sum over the tokens of each response, [T] -> [B], 0 for an empty one; differentiable.

    Booleans and integers are summed in float64, which is exact for any number of tokens that fits in memory.
    """
    if not terms.is_floating_point():
        terms = terms.to(torch.float64)
    if terms.numel() == 0:
        return terms.new_zeros(len(lengths))
    return torch.segment_reduce(terms, "sum", lengths=lengths, unsafe=True, initial=0)


def segment_mean(terms: Tensor, lengths: Tensor, counted: Tensor | None = None) -> Tensor:
    """Mean over the counted tokens of each response, [T] -> [B], 0 where none is counted; differentiable.

    What is not counted is neutralised before the sum, so it may hold NaN.
    """
    if counted is None:
        return segment_sum(terms, lengths) / lengths.clamp(min=1)
    total = segment_sum(torch.where(counted, terms, torch.zeros_like(terms)), lengths)
    return total / segment_sum(counted, lengths).clamp(min=1).to(total.dtype)


def segment_max(terms: Tensor, lengths: Tensor) -> Tensor:
    """Largest token term of each response, [T] -> [B], -inf for an empty one."""
    if terms.numel() == 0:
        return terms.new_full((len(lengths),), -torch.inf)
    return torch.segment_reduce(terms, "max", lengths=lengths, unsafe=True, initial=-torch.inf)


def counted_any(marked: Tensor, lengths: Tensor) -> Tensor:
    """Whether any token of each response is marked, [T] bool -> [B] bool."""
    return segment_sum(marked, lengths) > 0


def neutralise(values: Tensor, keep: Tensor | None, fill: float = 0.0) -> Tensor:
    """`fill` where `keep` is false, whatever `values` holds there (NaN and inf included).

    `where` before the arithmetic and not a product after it: `0 * NaN` is NaN, in the gradient too.
    """
    return values if keep is None else torch.where(keep, values, torch.full_like(values, fill))
