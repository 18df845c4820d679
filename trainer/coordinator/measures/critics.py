"""Critics: how well they explain returns, where, how calibrated they are, how they differ."""

from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from asyppo_async.algorithms.breakdowns import mask_overlaps, masked_mean
from asyppo_async.algorithms.calibration import (
    brier_score,
    calibration_bins,
    critic_agreement,
    explained_variance_by_length,
    explained_variance_by_position,
    ranking_quality,
    value_by_outcome,
)
from asyppo_async.algorithms.metrics import explained_variance_sums, value_std_quantiles
from asyppo_async.algorithms.packed import segment_starts, spread, unless_all
from asyppo_async.metrics import Metrics, known, merge
from asyppo_async.trainer.coordinator.measures.lengths import LENGTH_EDGES_TOKENS, filled_buckets
from asyppo_async.trainer.coordinator.step import StepResult


def critic_metrics(result: StepResult) -> Metrics:
    """Of every critic, and of the ensemble."""
    lengths = torch.from_numpy(result.batch.lengths)
    returns = spread(torch.from_numpy(result.batch.rewards), lengths)
    parts: list[Metrics] = []
    if result.values_before is not None:
        parts += [
            _explained(f"critic_{index}", "before", returns, torch.from_numpy(own))
            for index, own in enumerate(result.values_before)
        ]
    for index, own in enumerate(result.values):
        values = torch.from_numpy(own)
        parts.append(_explained(f"critic_{index}", "used", returns, values))
        parts.append(_breakdown(f"critic_{index}", result, returns, values))
        parts.append({f"critic_{index}/responses": float(len(result.batch.critic_shares[index]))})
    if len(result.values):
        parts.append(_ensemble_metrics(result))
    return merge(parts)


def calibration_of(result: StepResult) -> dict[str, list[float]]:
    """Responses, predicted and observed success rate in tenths of the prediction, by critic."""
    correct = torch.from_numpy(result.batch.correct)
    found = {}
    for index, own in enumerate(result.values):
        bins = calibration_bins(_start_values(result, torch.from_numpy(own)), correct)
        for kind in ("count", "predicted", "observed"):
            found[f"critic_{index}/calibration_{kind}"] = [float(getattr(each, kind)) for each in bins]
    return found


def _explained(name: str, when: str, returns: Tensor, values: Tensor) -> Metrics:
    sums = explained_variance_sums(returns, values)
    return {f"{name}/explained_variance_{when}": sums.explained_variance, f"{name}/bias_{when}": sums.bias}


def _breakdown(name: str, result: StepResult, returns: Tensor, values: Tensor) -> Metrics:
    lengths, correct = torch.from_numpy(result.batch.lengths), torch.from_numpy(result.batch.correct)
    outcome = value_by_outcome(values, correct, lengths)
    row = {
        f"{name}/value_of_right": outcome.right,
        f"{name}/value_of_wrong": outcome.wrong,
        **_start_quality(name, _start_values(result, values), correct),
    }
    for quarter, sums in enumerate(explained_variance_by_position(returns, values, lengths), 1):
        row[f"{name}/explained_variance_quarter_{quarter}"] = sums.explained_variance
    by_length = explained_variance_by_length(returns, values, lengths, edges=LENGTH_EDGES_TOKENS)
    for index, bucket in filled_buckets(lengths):
        row[f"{name}/explained_variance_{bucket}"] = by_length[index].explained_variance
    return known(row)


def _start_quality(name: str, start_values: Tensor, correct: Tensor) -> Metrics:
    """Brier score and AUC of V(s_0) [B], read as a probability of success."""
    success = ((start_values.double() + 1) / 2).clamp(0, 1)
    return {
        f"{name}/start_brier": brier_score(success, correct),
        f"{name}/start_auc": ranking_quality(success, correct),
    }


def _ensemble_metrics(result: StepResult) -> Metrics:
    decisions = result.decisions
    masks = decisions.std_masks
    ranked = decisions.masks.ranking
    overlaps = mask_overlaps(masks.advantage_keep, masks.entropy_keep, ranked)
    quantiles = value_std_quantiles(decisions.value_std, unless_all(ranked))
    row = {
        f"value_std/p{percent}": value for percent, value in zip((10, 20, 50, 80, 90), quantiles, strict=True)
    }
    row |= {
        "value_std/advantage_masked_share": overlaps.advantage_masked,
        "value_std/entropy_filtered_share": overlaps.entropy_filtered,
        "value_std/both_share": overlaps.both,
        "value_std/degenerate": float(masks.degenerate),
    }
    entropies = torch.from_numpy(np.require(result.proximal_entropies, requirements="W"))
    row["value_std/entropy_of_filtered"] = masked_mean(entropies, ranked & ~masks.entropy_keep)
    row["value_std/entropy_of_kept"] = masked_mean(entropies, masks.entropy_keep)
    if len(result.values) > 1:
        starts = [_start_values(result, torch.from_numpy(own)).double() for own in result.values]
        correct = torch.from_numpy(result.batch.correct)
        row |= _start_quality("critics", torch.stack(starts).mean(0), correct)
    for one, other in combinations(range(len(result.values)), 2):
        agreement = critic_agreement(
            torch.from_numpy(result.values[one]), torch.from_numpy(result.values[other])
        )
        row[f"critic_{one}/correlation_with_{other}"] = agreement.correlation
        row[f"critic_{one}/mean_above_{other}"] = agreement.mean_difference
    return known(row)


def _start_values(result: StepResult, values: Tensor) -> Tensor:
    """[B] V(s_0)."""
    return values[segment_starts(torch.from_numpy(result.batch.lengths))]
