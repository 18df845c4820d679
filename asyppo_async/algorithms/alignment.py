"""Which row of a model's output belongs to which response token.

    input ids    x_1 .. x_P  y_1 .. y_T         action a_t = y_{t+1}, state s_t = (x, y_1 .. y_t), t = 0 .. T-1
    output[p]    row p has seen ids[0 .. p]

    log pi(a_t | s_t) = log_softmax(logits[P-1+t])[ids[P+t]],   V(s_t) = value_head(hidden[P-1+t])

So logits, values and entropies of the response are rows [P-1 : P+T-1], one before the tokens [P : P+T]. Row
P+T-1, the state after the last token, is not used: V(s_T) = 0 by definition. V(s_0) is row P-1. The engine's
t-th log-prob belongs to a_t: its list has no shift.

Legend: `B` sequences, `T` packed response tokens, `S` packed positions of prompts and responses.
"""

import torch
from torch import Tensor

from asyppo_async.algorithms.packed import segment_starts, spread


def response_rows(prompt_lengths: Tensor, response_lengths: Tensor) -> Tensor:
    """Rows of the packed output that hold the states before each response token, [T] int64 into [S].

    Args:
        prompt_lengths: [B], each at least 1: an empty prompt has no row for V(s_0).
        response_lengths: [B].
    """
    if bool((prompt_lengths < 1).any()):
        raise ValueError(f"a prompt needs at least one token, got lengths {prompt_lengths.tolist()}")
    first = segment_starts(prompt_lengths + response_lengths) + prompt_lengths - 1
    return spread(first - segment_starts(response_lengths), response_lengths) + torch.arange(
        int(response_lengths.sum())
    )


def response_token_positions(prompt_lengths: Tensor, response_lengths: Tensor) -> Tensor:
    """Positions of the response tokens in the packed ids, [T] int64 into [S]: one after their rows."""
    return response_rows(prompt_lengths, response_lengths) + 1


def start_rows(prompt_lengths: Tensor, response_lengths: Tensor) -> Tensor:
    """Rows of V(s_0), the last prompt tokens, [B] int64 into [S]."""
    return segment_starts(prompt_lengths + response_lengths) + prompt_lengths - 1
