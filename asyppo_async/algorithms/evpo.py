"""A critic only where it explains something: EVPO (2604.19485).

    EV = 1 - Var(G - V) / Var(G) over the batch;   A = G - V if EV > 0, else A = G - mean(G)

Legend: `B` responses, `T` packed tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from asyppo_async.algorithms.group_advantages import group_statistics
from asyppo_async.algorithms.metrics import explained_variance
from asyppo_async.algorithms.packed import compute_dtype, neutralise, segment_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedAdvantages:
    """Advantages and which baseline they have."""

    advantages: Tensor
    """[T], 0 where not valid."""
    explained_variance: float
    """Of the pre-update values on this batch; NaN if the returns do not vary, and then the mean is the
    baseline.
    """
    used_critic: bool


def gated_advantages(
    returns: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    valid: Tensor | None = None,
    group_ids: Tensor | None = None,
    threshold: float = 0.0,
) -> GatedAdvantages:
    """The critic's value as baseline if it explains the returns of this batch, else their mean.

    Args:
        returns: [T].
        values: [T] from before the critic's update with this batch.
        lengths: [B].
        valid: [T] bool.
        group_ids: [B] to take the mean per group; None for the batch. Means are over valid tokens.
        threshold: of the explained variance.
    """
    dtype = compute_dtype(returns, values)
    explained = explained_variance(returns, values, valid)
    everything = torch.ones_like(returns, dtype=torch.bool) if valid is None else valid
    exact = returns.detach().double()
    used_critic = explained > threshold
    if used_critic:
        baseline = values.detach().double()
    elif group_ids is None:
        baseline = exact[everything].mean().expand(len(exact))
    else:
        token_groups = group_ids[segment_ids(lengths)]
        baseline = torch.zeros_like(exact)
        baseline[everything] = group_statistics(exact[everything], token_groups[everything]).mean
    return GatedAdvantages(
        advantages=neutralise(exact - baseline, everything).to(dtype),
        explained_variance=explained,
        used_critic=used_critic,
    )
