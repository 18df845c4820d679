"""What a response that was cut off is worth: three conventions for its reward and for V(s_T).

    finished   it ended: reward -1 (or what is given), V(s_T) = 0              AsyPPO, VC-PPO, S3AC at maximum length
    bootstrap  no reward, V(s_T) from the critic                               AReaL
    egae       no reward, V(s_T) = V(s_{T-1}), so delta_{T-1} = 0 at gamma 1   T-PPO 2506.15050

Under bootstrap and egae a critic is still trained on finished responses only. Legend: `B` responses, `T`
tokens.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyppo_async.algorithms.packed import compute_dtype, segment_starts, segment_sum

TruncationRule = Literal["finished", "bootstrap", "egae"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEnds:
    """What `gae` needs to know about the ends of a batch."""

    rewards: Tensor
    """[B]"""
    bootstrap_values: Tensor
    """[B] V(s_T); 0 for a finished response."""
    critic_trains: Tensor
    """[B] bool, the responses whose return is known."""


def episode_ends(
    rewards: Tensor,
    values: Tensor,
    lengths: Tensor,
    truncated: Tensor,
    rule: TruncationRule,
    *,
    truncated_reward: float = -1.0,
    last_values: Tensor | None = None,
    action_mask: Tensor | None = None,
) -> EpisodeEnds:
    """Apply a convention to the truncated responses of a batch.

    Args:
        rewards: [B]; those of truncated responses are replaced.
        values: [T] value before each token.
        lengths: [B].
        truncated: [B] bool.
        rule: see the module.
        truncated_reward: under "finished".
        last_values: [B] value of the state after the last token, under "bootstrap".
        action_mask: [T] bool; egae takes the value at the last action token.
    """
    rewards = rewards.to(compute_dtype(rewards))
    nothing = torch.zeros_like(rewards)
    if rule == "finished":
        ended = torch.where(truncated, torch.full_like(rewards, truncated_reward), rewards)
        return EpisodeEnds(rewards=ended, bootstrap_values=nothing, critic_trains=torch.ones_like(truncated))
    if rule == "bootstrap":
        if last_values is None:
            raise ValueError("truncated responses bootstrap from last_values, got None")
        ends = last_values.detach().to(rewards.dtype)
    elif rule == "egae":
        if action_mask is not None:
            values, lengths = values[action_mask], segment_sum(action_mask, lengths).to(torch.int64)
        last = (segment_starts(lengths) + lengths - 1).clamp(min=0)
        # One value behind the last keeps the index of an empty batch legal; it is never chosen.
        padded = torch.cat([values.detach(), values.new_zeros(1)])
        ends = torch.where(lengths > 0, padded[last].to(rewards.dtype), nothing)
    else:
        raise ValueError(f"truncated responses are 'finished', 'bootstrap' or 'egae', got {rule!r}")
    return EpisodeEnds(
        rewards=torch.where(truncated, nothing, rewards),
        bootstrap_values=torch.where(truncated, ends, nothing),
        critic_trains=~truncated,
    )
