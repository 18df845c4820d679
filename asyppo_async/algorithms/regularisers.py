"""Terms beside the policy loss: KL to a reference, and the likelihood of right answers. Per token, to be
added.

Legend: `B` responses, `T` packed tokens.
"""

from typing import Literal

import torch
from torch import Tensor

from asyppo_async.algorithms.mismatch import LOG_RATIO_LIMIT
from asyppo_async.algorithms.packed import spread

KlEstimator = Literal["k1", "k2", "k3"]


def kl_penalty(policy_logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """KL(pi_theta || pi_ref) per token, [T], with gradient; with d = log pi_ref - log pi_theta:

        k1 = -d                 unbiased; its gradient as a loss has mean zero, so k1 belongs into the reward
        k2 = d^2 / 2            biased value, unbiased gradient
        k3 = exp(d) - 1 - d     unbiased, never negative

    The expectation is over pi_theta. On stale data the samples are from mu: weight the terms by a detached u,
    or call the figure approximate.
    """
    difference = reference_logprobs.detach() - policy_logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp() - 1 - difference
    raise ValueError(f"a KL estimator is 'k1', 'k2' or 'k3', got {estimator!r}")


def positive_nll(policy_logprobs: Tensor, correct: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """-log pi on the tokens of right responses, and which tokens those are: (terms [T], counted [T] bool).

    Its denominator is the number of those tokens (globally), whatever that of the policy loss is. (VAPO
    2504.05118, coefficient 0.1.)

    Args:
        policy_logprobs: [T] with gradient.
        correct: [B] bool.
        lengths: [B].
    """
    counted = spread(correct, lengths)
    return torch.where(counted, -policy_logprobs, torch.zeros_like(policy_logprobs)), counted
