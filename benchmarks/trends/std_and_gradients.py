"""Whether the tokens on which the critics agree are those that move the policy least (the premise of AsyPPO's mask).

The size of a token's gradient with respect to the logits is known in closed form: |A| times the norm of (one-hot - pi),
and |one-hot - pi|^2 = 1 - 2 pi(a) + sum pi^2.
"""

import torch
from torch import Tensor

from asyppo_async.algorithms.advantages import gae
from asyppo_async.algorithms.critics import value_std
from benchmarks.trends.learning import FLOAT32
from benchmarks.trends.measuring import at_stages, sample_all
from benchmarks.trends.studies import STUDIES

STAGES = (5, 20, 40, 60)
"""Training steps; before the first the critics are the same."""
MASK_SHARE = 0.2


def std_against_gradients(seed: int) -> list[dict[str, float | str]]:
    """At each stage of a run with two critics on disjoint halves, over every token of many responses."""
    arm = next(arm for arm in STUDIES["ladder"].arms if arm.name == "group split")
    rows: list[dict[str, float | str]] = []
    for stage, run in at_stages(arm, seed, STAGES):
        sampled = sample_all(run.policy, FLOAT32, seed)
        with torch.inference_mode():
            distribution = sampled.distribution(run.policy)
        values = sampled.values(run.critics)
        advantages = gae(sampled.rewards, values.mean(0), sampled.lengths, 1.0)
        squared = 1 - 2 * distribution.logprobs.exp() + distribution.squared_probabilities
        norms = squared.clamp(min=0).sqrt()
        rows.append(
            {"stage": stage, "reward": float(sampled.rewards.mean())}
            | _figures(value_std(values), advantages.abs(), norms)
        )
    return rows


def _figures(std: Tensor, sizes: Tensor, norms: Tensor) -> dict[str, float | str]:
    """Rank correlations, the 2 x 2 median table, and what the mask would take."""
    gradients = sizes * norms
    low_std, low_gradient = std <= std.median(), gradients <= gradients.median()
    masked = std.argsort()[: int(MASK_SHARE * len(std))]
    return {
        "rank_std_gradient": rank_correlation(std, gradients),
        "rank_std_advantage": rank_correlation(std, sizes),
        "rank_std_norm": rank_correlation(std, norms),
        "low_low": _share(low_std & low_gradient),
        "low_high": _share(low_std & ~low_gradient),
        "high_low": _share(~low_std & low_gradient),
        "high_high": _share(~low_std & ~low_gradient),
        "masked_gradient": float(gradients[masked].mean() / gradients.mean()),
        "masked_gradient_share": float(gradients[masked].sum() / gradients.sum()),
    }


def rank_correlation(one: Tensor, other: Tensor) -> float:
    """Spearman's, ties in order of position (both are continuous)."""
    ranks = torch.stack([values.argsort(stable=True).argsort() for values in (one, other)]).double()
    return float(torch.corrcoef(ranks)[0, 1])


def _share(marked: Tensor) -> float:
    return float(marked.double().mean())
