"""Advantages and value targets from a terminal reward and the values of the states.

Legend: `B` responses, `T` packed tokens. State `s_t` is the prompt and the first t tokens of the response,
the value at packed position t is `V(s_t)` of the state *before* that token, and `V(s_T) = 0`: the episode has
ended. Nothing here carries a gradient.
"""

import numpy as np
import torch
from torch import Tensor

from asyppo_async.algorithms.packed import check_lengths, compute_dtype, segment_starts, segment_sum, spread

_BLOCK_STEPS = 64
"""Time steps of all responses that the recurrence holds at once."""


def gae(
    rewards: Tensor,
    values: Tensor,
    lengths: Tensor,
    lambda_: float | Tensor,
    *,
    gamma: float = 1.0,
    action_mask: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
) -> Tensor:
    """Generalised advantage estimation with the reward on the last action token.

        delta_t = r_t + gamma V(s_{t+1}) - V(s_t),   A_t = delta_t + gamma lambda A_{t+1}

    (Schulman et al., 1506.02438.) The recurrence runs in float64; the result has the dtype of `values`,
    float32 for anything below. With an action mask the observation tokens are taken out and the action tokens
    are chained (skip-observation GAE, SAO 2607.07508): the value at an observation token is never read.

    Args:
        rewards: [B] terminal reward of each response.
        values: [T] value of the state before each token.
        lengths: [B] tokens of each response, observation tokens included.
        lambda_: one number, or [B] one per response.
        gamma: discount per action token.
        action_mask: [T] bool, true for the tokens that the policy emitted; None means all of them.
        bootstrap_values: [B] V(s_T) of responses that were cut before their end; None means 0 for all.

    Returns:
        [T] advantages, 0 on observation tokens.
    """
    check_lengths(lengths, len(values))
    if action_mask is not None:
        actions = gae(
            rewards,
            values[action_mask],
            segment_sum(action_mask, lengths).to(torch.int64),
            lambda_,
            gamma=gamma,
            bootstrap_values=bootstrap_values,
        )
        return torch.zeros(len(values), dtype=actions.dtype).masked_scatter_(action_mask, actions)
    dtype = compute_dtype(values)
    values = values.detach().to(dtype)
    ends = (
        torch.zeros(len(lengths), dtype=torch.float64)
        if bootstrap_values is None
        else bootstrap_values.double()
    )
    if gamma == 1.0 and isinstance(lambda_, float | int) and lambda_ == 1.0:
        return spread((rewards.double() + ends).to(dtype), lengths) - values
    return _reverse_scan(rewards.double(), values, lengths, lambda_, gamma, ends)


def _reverse_scan(
    rewards: Tensor, values: Tensor, lengths: Tensor, lambda_: float | Tensor, gamma: float, ends: Tensor
) -> Tensor:
    """The recurrence over all responses at once, one time step from the end at a time.

    Responses are ordered longest first, so that those still running at step k form a prefix. A block of steps is
    copied out, time by response, so that the loop over steps reads and writes rows; the extra memory is one block.
    """
    order = torch.argsort(lengths, descending=True)
    ordered_lengths = lengths[order]
    last = (segment_starts(lengths) + lengths - 1)[order].numpy()
    decay = (gamma * torch.as_tensor(lambda_, dtype=torch.float64)).expand(len(lengths))[order].numpy()
    ordered_rewards, next_values = rewards[order].numpy(), ends[order].numpy()
    longest = int(ordered_lengths[0]) if len(lengths) else 0
    steps = torch.arange(1, longest + 1)
    running = torch.searchsorted(-ordered_lengths, -steps, right=True).tolist()
    read = values.numpy()
    written = np.empty_like(read)
    advantages = np.zeros(len(lengths))
    for begin in range(0, longest, _BLOCK_STEPS):
        counts = running[begin : begin + _BLOCK_STEPS]
        rows, whole = counts[0], counts[-1]
        # [R, K]; before the start of a response that ends within the block lies what is read and never used.
        positions = last[:rows, None] - np.arange(begin, begin + len(counts))
        here = np.ascontiguousarray(read[np.maximum(positions, 0)].T, dtype=np.float64)
        deltas = gamma * np.concatenate([next_values[None, :rows], here[:-1]]) - here
        if begin == 0:
            deltas[0] += ordered_rewards[:rows]
        for delta, count in zip(deltas, counts, strict=True):
            np.multiply(decay[:count], advantages[:count], out=advantages[:count])
            np.add(delta[:count], advantages[:count], out=advantages[:count])
            delta[:count] = advantages[:count]
        next_values = here[-1]
        written[positions[:whole]] = deltas[:, :whole].T
        for row in range(whole, rows):
            inside = int(ordered_lengths[row]) - begin
            written[positions[row, :inside]] = deltas[:inside, row]
    return torch.from_numpy(written)


def value_targets(
    rewards: Tensor,
    values: Tensor,
    lengths: Tensor,
    lambda_critic: float | Tensor,
    *,
    gamma: float = 1.0,
    action_mask: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
) -> Tensor:
    """What a critic is regressed to: the Monte Carlo return at lambda 1, the lambda-return below.

        G_t = sum of rewards from t on        (lambda = gamma = 1: R at every token, `values` is not read)
        G_t = A_t(lambda_critic) + V(s_t)     otherwise

    (VC-PPO 2503.01491, decoupled GAE: the critic's lambda is its own, normally 1.) Never computed from
    whitened advantages. Arguments as in `gae`; 0 on observation tokens.
    """
    check_lengths(lengths, len(values))
    if gamma == 1.0 and isinstance(lambda_critic, float | int) and lambda_critic == 1.0:
        ends = 0.0 if bootstrap_values is None else bootstrap_values.double()
        targets = spread((rewards.double() + ends).to(compute_dtype(values)), lengths)
        return (
            targets if action_mask is None else torch.where(action_mask, targets, torch.zeros_like(targets))
        )
    if action_mask is not None:
        values = torch.where(action_mask, values, torch.zeros_like(values))
    advantages = gae(
        rewards,
        values,
        lengths,
        lambda_critic,
        gamma=gamma,
        action_mask=action_mask,
        bootstrap_values=bootstrap_values,
    )
    return advantages + values.detach().to(advantages.dtype)


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """lambda = max(0, 1 - 1 / (alpha T)) per response, [B] float64; 0 for an empty response.

    (VAPO 2504.05118, alpha 0.05; SAO and S3AC, alpha 1.5.) With an action mask pass the number of action
    tokens. float64 because 1 - lambda of a long response is below the resolution of float32 near 1.
    """
    if alpha <= 0:
        raise ValueError(f"alpha must be above 0, got {alpha}")
    return (1.0 - 1.0 / (alpha * lengths.double())).clamp(min=0.0)


def whiten(
    advantages: Tensor, valid: Tensor | None = None, *, unbiased: bool = False, epsilon: float = 1e-8
) -> Tensor:
    """(A - mean) / sqrt(variance + epsilon) over all valid tokens of the batch (the token measure); 0
    elsewhere.

    Off by default in AsyPPO and S3AC. `unbiased` divides the variance by N - 1 (verl). Statistics in float64.
    """
    chosen = advantages if valid is None else advantages[valid]
    if chosen.numel() == 0:
        return torch.zeros_like(advantages)
    exact = chosen.double()
    variance = exact.var(correction=1 if unbiased and exact.numel() > 1 else 0)
    whitened = ((exact - exact.mean()) * torch.rsqrt(variance + epsilon)).to(advantages.dtype)
    return whitened if valid is None else torch.zeros_like(advantages).masked_scatter_(valid, whitened)
