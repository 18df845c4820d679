"""The age of tokens in versions: what is too old, and the proximal policy that A-3PO reads off the age.

Legend: `B` responses, `T` packed tokens.
"""

from typing import Literal

from torch import Tensor

from asyppo_async.algorithms.packed import segment_max, segment_mean

TrajectoryAge = Literal["oldest", "mean", "newest"]


def stale_tokens(versions: Tensor, trainer_version: int, max_staleness: int) -> Tensor:
    """Tokens older than the bound, [T] bool: trainer version at the start of the step - version >
    max_staleness.
    """
    return trainer_version - versions > max_staleness


def trajectory_staleness(
    versions: Tensor, lengths: Tensor, trainer_version: int, how: TrajectoryAge = "oldest"
) -> Tensor:
    """Staleness of each response, [B] float64: of its oldest token (the rule that is bounded), the mean or
    the newest.
    """
    age = (trainer_version - versions).double()
    if how == "oldest":
        return segment_max(age, lengths)
    if how == "mean":
        return segment_mean(age, lengths)
    if how == "newest":
        return -segment_max(-age, lengths)
    raise ValueError(
        f"the staleness of a response is 'oldest', 'mean' or 'newest' of its tokens, got {how!r}"
    )


def approximate_proximal(
    behaviour_logprobs: Tensor, policy_logprobs: Tensor, versions: Tensor, policy_version: int
) -> Tensor:
    """log pi_prox between log mu and log pi_theta by age, [T], no gradient: saves the proximal forward.
    (A-3PO 2512.06547.)

        log pi_prox = log mu + alpha (log pi_theta - log mu),   alpha = (v_prox - v_mu) / (v_theta - v_mu),
        v_prox = v_theta - 1;   alpha = 0 for a token that is not older than v_prox

    Args:
        behaviour_logprobs: [T].
        policy_logprobs: [T] at the start of the step.
        versions: [T] version that sampled each token.
        policy_version: v_theta.
    """
    age = (policy_version - versions).double()
    alpha = ((age - 1) / age.clamp(min=1)).clamp(min=0)
    behaviour, policy = behaviour_logprobs.detach(), policy_logprobs.detach()
    return behaviour + alpha.to(behaviour.dtype) * (policy - behaviour)
