"""The ensemble of critics: its value, its disagreement, who learns from which response, and the value loss.

Legend: `M` critics, `B` responses, `T` packed tokens. Source unless said: AsyPPO (2510.01656).
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, isfinite, sqrt
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from asyppo_async.algorithms.packed import compute_dtype, count_true

ValueAggregation = Literal["mean", "min"]


def ensemble_value(values: Tensor, how: ValueAggregation = "mean") -> Tensor:
    """The value that feeds GAE, [M, T] -> [T]: mean over critics (the paper's choice) or their minimum."""
    values = values.to(compute_dtype(values))
    if how == "mean":
        return values.mean(0)
    if how == "min":
        return values.amin(0)
    raise ValueError(f"values are aggregated by 'mean' or 'min', got {how!r}")


def value_std(values: Tensor, *, sample: bool = False) -> Tensor:
    """Standard deviation over the critics at each token, [M, T] -> [T]; 0 for a single critic.

    For M = 2 the population value is |V1 - V2| / 2, computed so: the general formula cancels in floating
    point.

    Args:
        values: [M, T].
        sample: divide by M - 1 instead of M: larger by a constant factor, so that every ranking is the same.
    """
    values = values.to(compute_dtype(values))
    num_critics = len(values)
    if num_critics == 1:
        return torch.zeros_like(values[0])
    std = (values[0] - values[1]).abs() / 2 if num_critics == 2 else values.std(0, correction=0)
    return std * sqrt(num_critics / (num_critics - 1)) if sample else std


def split_groups(
    prompt_ids: Sequence[str],
    draw_ids: Sequence[int],
    sample_indices: Sequence[int],
    *,
    num_critics: int,
    seed: int,
    step: int,
) -> Tensor:
    """Which critic learns from which response: disjoint, covering, and even inside each group of responses.

    Within a group (one draw of a prompt) the responses are ordered by the 8-byte BLAKE2b of
    `seed|step|prompt id|sample index`, and rank j goes to critic (j + offset) mod M, where the offset is the
    number of responses in earlier groups (by draw id) mod M. So sizes differ by at most 1 inside a group and
    over the batch, also for groups smaller than M, and the result depends neither on arrival order nor on the
    machine.

    Args:
        prompt_ids: B ids, one per response.
        draw_ids: B draw ids; responses with the same one form a group.
        sample_indices: B indices of the response within its group.
        num_critics: M.
        seed: of the run.
        step: training step, so that a prompt's responses are split anew each time.

    Returns:
        [B] int64, index of the critic.
    """
    if num_critics < 1:
        raise ValueError(f"the number of critics must be at least 1, got {num_critics}")
    members: dict[int, list[tuple[bytes, int]]] = defaultdict(list)
    for row, (prompt_id, draw_id, sample) in enumerate(
        zip(prompt_ids, draw_ids, sample_indices, strict=True)
    ):
        text = f"{seed}|{step}|{prompt_id}|{sample}"
        members[draw_id].append((hashlib.blake2b(text.encode(), digest_size=8).digest(), row))
    assignment = torch.zeros(len(prompt_ids), dtype=torch.int64)
    offset = 0
    for draw_id in sorted(members):
        for rank, (_, row) in enumerate(sorted(members[draw_id])):
            assignment[row] = (rank + offset) % num_critics
        offset += len(members[draw_id])
    return assignment


def share_count(share: float, total: int) -> int:
    """floor(share * total), safe against `0.29 * 100 = 28.999...`."""
    return floor(share * total + 1e-9)


def extremes(scores: Tensor) -> tuple[float, float]:
    """Smallest and largest; NaN as soon as one score is."""
    lowest, highest = torch.aminmax(scores)
    return float(lowest), float(highest)


def all_equal(scores: Tensor) -> bool:
    """Whether a ranking means nothing: the scores differ by less than 1e-12, or there is none."""
    if scores.numel() == 0:
        return True
    lowest, highest = torch.aminmax(scores)
    return float(highest - lowest) < 1e-12


def select_lowest(scores: Tensor, share: float, valid: Tensor | None = None) -> Tensor:
    """Mark exactly floor(share * N) of the N valid tokens: those with the lowest scores, [T] bool.

    Of equal scores at the cut the earlier flat index is taken (the order of a stable sort), so the count is
    exact under ties too. A partition finds the cut; nothing is sorted. What is not valid is never read.

    Raises:
        ValueError: a valid score is not finite, or the share is outside [0, 1].
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"a share lies in [0, 1], got {share}")
    everything = valid is None or bool(valid.all())
    chosen = scores.detach() if everything or valid is None else scores.detach()[valid]
    if chosen.numel() and not all(map(isfinite, extremes(chosen))):
        finite = torch.isfinite(chosen)
        raise ValueError(
            f"{count_true(~finite)} of {chosen.numel()} scores are not finite; a critic has diverged"
        )
    count = share_count(share, chosen.numel())
    selected = torch.zeros(chosen.numel(), dtype=torch.bool)
    if count > 0:
        cut = float(np.partition(chosen.numpy(), count - 1)[count - 1])
        selected = chosen < cut
        ties = torch.nonzero(chosen == cut).squeeze(1)
        selected[ties[: count - count_true(selected)]] = True
    if everything or valid is None:
        return selected
    return torch.zeros_like(valid).masked_scatter_(valid, selected)


def select_highest(scores: Tensor, share: float, valid: Tensor | None = None) -> Tensor:
    """As `select_lowest`, with the highest scores; of equal ones again the earlier flat index."""
    return select_lowest(-scores, share, valid)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueStdMasks:
    """The advantage mask I^A and the entropy filter I^H of AsyPPO's objective, as what is kept."""

    advantage_keep: Tensor
    """[T] bool; false for the `Low_k` tokens (and for what is not valid)."""
    entropy_keep: Tensor
    """[T] bool; false for the `Top_h` tokens (and for what is not valid)."""
    num_advantage_masked: int
    num_entropy_filtered: int
    degenerate: bool
    """All value stds were equal, so that a ranking means nothing and both masks were skipped."""


def value_std_masks(
    std: Tensor, *, advantage_share: float, entropy_share: float, valid: Tensor | None = None
) -> ValueStdMasks:
    """Low_k and Top_h over all valid tokens of the batch: once per batch, before any mismatch rejection.

        I^A_t = 0 if sigma_t in Low_k(sigma);   I^H_t = 0 if sigma_t in Top_h(sigma)

    If the largest and the smallest std differ by less than 1e-12 both masks are skipped and `degenerate` is
    set.
    """
    everything = torch.ones_like(std, dtype=torch.bool) if valid is None else valid
    degenerate = all_equal(std if bool(everything.all()) else std[everything])
    if degenerate:
        advantage_share = entropy_share = 0.0
    masked = select_lowest(std, advantage_share, everything)
    filtered = select_highest(std, entropy_share, everything)
    return ValueStdMasks(
        advantage_keep=everything & ~masked,
        entropy_keep=everything & ~filtered,
        num_advantage_masked=count_true(masked),
        num_entropy_filtered=count_true(filtered),
        degenerate=degenerate,
    )


def value_loss(
    values: Tensor,
    targets: Tensor,
    *,
    clip: float | None = None,
    old_values: Tensor | None = None,
    half: bool = True,
) -> Tensor:
    """Squared error of each token, [T], with gradient to `values` only.

        plain    1/2 (V - G)^2
        clipped  1/2 max((V - G)^2, (V_old + clamp(V - V_old, -clip, clip) - G)^2)       (PPO)

    Args:
        values: [T] of the critic being trained.
        targets: [T].
        clip: eps_v, None for the plain loss (AsyPPO, VC-PPO).
        old_values: [T] values before this batch's updates; needed with `clip`.
        half: false drops the factor 1/2, which AsyPPO's equation does not have.
    """
    targets = targets.detach()
    error = (values - targets).square()
    if clip is not None:
        if old_values is None:
            raise ValueError("a clipped value loss needs old_values, got None")
        old_values = old_values.detach()
        limited = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (limited - targets).square())
    return 0.5 * error if half else error
