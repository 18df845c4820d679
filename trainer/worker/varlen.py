"""Attention over packed responses in one kernel, where torch has one: 16-bit weights on a GPU (flash attention).

Legend: `T` tokens of a micro-batch, `A` attention heads, `D` dimension of one.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

_CAUSAL = (-1, 0)
_LARGEST_HEAD = 256
_HEAD_MULTIPLE = 8


def takes(query: Tensor) -> bool:
    """Whether the kernel computes such a tensor [1, A, T, D]."""
    size = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and size <= _LARGEST_HEAD
        and size % _HEAD_MULTIPLE == 0
    )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: tuple[int, ...],
    *,
    scale: float | None,
    kernel: Callable[..., Tensor] = varlen_attn,  # type: ignore[assignment]
) -> Tensor:
    """[1, A, T, D] each, of keys and values with as many heads or fewer -> [1, T, A, D]; documents of these lengths."""
    ends = _ends(lengths, query.device)
    tokens = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    longest = max(lengths)
    attended = kernel(
        *tokens, ends, ends, longest, longest, scale=scale, window_size=_CAUSAL, enable_gqa=True
    )
    return attended[None]


@lru_cache(maxsize=2)
def _ends(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """[documents + 1] where each begins and ends; once for all layers of a micro-batch."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
