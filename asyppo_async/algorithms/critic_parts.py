"""The two things that a critic knows, apart: how hard a prompt is, and where along a response the outcome turned.

    prompt  A_t = R - V(s_0)
    token   A_t = GAE_t - mean_t GAE + R - mean R        (mean over the response; mean R over the batch)
    both    A_t = GAE_t

Of S3AC's comparison these are the arms between REINFORCE (neither) and the whole critic (both).
Legend: `B` responses, `T` packed tokens.
"""

import torch
from torch import Tensor

from asyppo_async.algorithms.packed import segment_mean, segment_starts, spread


def prompt_advantages(returns: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """R - V(s_0) at every token, [T].

    Args:
        returns: [B] R.
        values: [T]; only the first of each response is read.
        lengths: [B], each at least 1.
    """
    return spread(returns.to(values.dtype) - values[segment_starts(lengths)], lengths)


def token_advantages(gae: Tensor, returns: Tensor, lengths: Tensor) -> Tensor:
    """GAE without its mean over each response, and the batch's baseline in place of that mean, [T].

    Args:
        gae: [T].
        returns: [B] R.
        lengths: [B].
    """
    of_responses = returns.double() - returns.double().mean()
    shape = gae.double() - spread(segment_mean(gae.double(), lengths), lengths)
    return (shape + spread(of_responses, lengths)).to(torch.promote_types(gae.dtype, torch.float32))
