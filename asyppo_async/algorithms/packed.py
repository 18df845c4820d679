"""Packed tensors: the tokens of a batch's responses laid end to end.

Legend: `B` responses, `T` tokens of all responses together. `lengths` is [B] int64 and sums to `T`; a
response may be empty.
"""

import numpy as np
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
    """Repeat a value per response over its tokens, [B] -> [T]; differentiable."""
    if (
        per_response.requires_grad
        or per_response.device.type != "cpu"
        or per_response.dtype == torch.bfloat16
    ):
        return torch.repeat_interleave(per_response, lengths)
    # torch makes an index of 8 bytes a token first, and takes ten times as long.
    return torch.from_numpy(np.repeat(per_response.numpy(), lengths.numpy()))


def count_true(mask: Tensor) -> int:
    """True elements of a bool tensor; numpy counts booleans many times faster than torch sums them."""
    return int(np.count_nonzero(mask.numpy())) if mask.device.type == "cpu" else int(mask.sum())


def segment_sum(terms: Tensor, lengths: Tensor) -> Tensor:
    """Sum over the tokens of each response, [T] -> [B], 0 for an empty one; differentiable.

    Booleans and integers are summed in float64, which is exact for any number of tokens that fits in memory.
    """
    if terms.dtype == torch.bool and terms.device.type == "cpu":
        return _segment_counts(terms, lengths)
    if not terms.is_floating_point():
        terms = terms.to(torch.float64)
    if terms.numel() == 0:
        # The sum keeps the graph: a loss of no token has a backward too.
        return terms.new_zeros(len(lengths)) + terms.sum()
    return torch.segment_reduce(terms, "sum", lengths=lengths, unsafe=True, initial=0)


def _segment_counts(mask: Tensor, lengths: Tensor) -> Tensor:
    """True elements of each response, [B] float64; masks that are all true or all false cost one look."""
    marked = count_true(mask)
    if marked == len(mask):
        return lengths.double()
    counts = np.zeros(len(lengths))
    if marked:
        filled = (lengths > 0).numpy()
        starts = segment_starts(lengths).numpy()[filled]
        counts[filled] = np.add.reduceat(mask.numpy().view(np.int8), starts, dtype=np.int64)
    return torch.from_numpy(counts)


def segment_totals(terms: Tensor, lengths: Tensor) -> Tensor:
    """`segment_sum` of host numbers without gradient, for measuring: pairwise sums in float64, [T] -> [B]."""
    totals = np.zeros(len(lengths))
    filled = (lengths > 0).numpy()
    if filled.any():
        totals[filled] = np.add.reduceat(terms.double().numpy(), segment_starts(lengths).numpy()[filled])
    return torch.from_numpy(totals)


def segment_extremes(terms: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest term of each response that has tokens, host numbers of any type, [T] -> [B'] twice."""
    starts = segment_starts(lengths)[lengths > 0].numpy()
    if not len(starts):
        return terms[:0], terms[:0]
    flat = terms.numpy()
    return torch.from_numpy(np.minimum.reduceat(flat, starts)), torch.from_numpy(
        np.maximum.reduceat(flat, starts)
    )


def segment_mean(terms: Tensor, lengths: Tensor, counted: Tensor | None = None) -> Tensor:
    """Mean over the counted tokens of each response, [T] -> [B], 0 where none is counted; differentiable.

    What is not counted is neutralised before the sum, so it may hold NaN.
    """
    if counted is None:
        return segment_sum(terms, lengths) / lengths.clamp(min=1)
    total = segment_sum(torch.where(counted, terms, torch.zeros_like(terms)), lengths)
    return total / segment_sum(counted, lengths).clamp(min=1).to(total.dtype)


def suffix_sum(terms: Tensor, lengths: Tensor) -> Tensor:
    """Sum from each token to the end of its response, [T] -> [T], in float64 and back in the dtype given."""
    exact = terms.double()
    before = torch.cat([exact.new_zeros(1), exact.cumsum(0)])
    return (spread(before[lengths.cumsum(0)], lengths) - before[:-1]).to(terms.dtype)


def segment_max(terms: Tensor, lengths: Tensor) -> Tensor:
    """Largest token term of each response, [T] -> [B], -inf for an empty one."""
    if terms.numel() == 0:
        return terms.new_full((len(lengths),), -torch.inf)
    return torch.segment_reduce(terms, "max", lengths=lengths, unsafe=True, initial=-torch.inf)


def counted_any(marked: Tensor, lengths: Tensor) -> Tensor:
    """Whether any token of each response is marked, [T] bool -> [B] bool."""
    return segment_sum(marked, lengths) > 0


def unless_all(keep: Tensor) -> Tensor | None:
    """`keep`, or None if it keeps everything: what reads only what is kept may then leave out the choosing."""
    return None if bool(keep.all()) else keep


def neutralise(values: Tensor, keep: Tensor | None, fill: float = 0.0) -> Tensor:
    """`fill` where `keep` is false, whatever `values` holds there (NaN and inf included).

    `where` before the arithmetic and not a product after it: `0 * NaN` is NaN, in the gradient too.
    """
    return values if keep is None else torch.where(keep, values, fill)
