"""How good the critics are: by position, by length, against outcomes, and against each other.

Legend: `M` critics, `B` responses, `T` packed tokens. A statistic of nothing is NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asyppo_async.algorithms.metrics import ExplainedVarianceSums, explained_variance_segments
from asyppo_async.algorithms.packed import neutralise, segment_starts, segment_sum, segment_totals, spread


def relative_position(lengths: Tensor, num_parts: int) -> Tensor:
    """Part of its response that each token lies in, [T] int64 in [0, num_parts): floor(num_parts * t / T)."""
    index = torch.arange(int(lengths.sum())) - spread(segment_starts(lengths), lengths)
    return index * num_parts // spread(lengths, lengths)


def part_lengths(lengths: Tensor, num_parts: int) -> Tensor:
    """Tokens of each response in each of its parts, [B * num_parts] int64: what `relative_position` counts."""
    starts = -(-torch.arange(num_parts + 1) * lengths[:, None] // num_parts)
    return starts.diff(dim=1).reshape(-1)


def explained_variance_by_position(
    returns: Tensor, values: Tensor, lengths: Tensor, *, num_parts: int = 4, valid: Tensor | None = None
) -> tuple[ExplainedVarianceSums, ...]:
    """Sums per part of the response (quartiles)."""
    sums = explained_variance_segments(returns, values, part_lengths(lengths, num_parts), valid)
    return tuple(ExplainedVarianceSums.of(part) for part in sums.view(-1, num_parts, 5).sum(0))


def mean_by_position(
    terms: Tensor, lengths: Tensor, *, num_parts: int, valid: Tensor | None = None
) -> tuple[float, ...]:
    """Mean of a token term per part of the response: |A| by decile, for one."""
    parts = part_lengths(lengths, num_parts)
    totals = segment_totals(neutralise(terms, valid), parts).view(-1, num_parts).sum(0)
    counts = (parts if valid is None else segment_sum(valid, parts)).view(-1, num_parts).sum(0)
    return tuple((totals / counts).tolist())


def length_bucket(lengths: Tensor, edges: Sequence[int]) -> Tensor:
    """Bucket of each response, [B] int64: bucket i holds lengths up to edges[i], the last one the rest."""
    return torch.bucketize(lengths, torch.tensor(list(edges)))


def explained_variance_by_length(
    returns: Tensor, values: Tensor, lengths: Tensor, *, edges: Sequence[int], valid: Tensor | None = None
) -> tuple[ExplainedVarianceSums, ...]:
    """Sums per bucket of response length."""
    sums = explained_variance_segments(returns, values, lengths, valid)
    bucket = length_bucket(lengths, edges)
    return tuple(ExplainedVarianceSums.of(sums[bucket == index].sum(0)) for index in range(len(edges) + 1))


def share_by_length(marked: Tensor, lengths: Tensor, edges: Sequence[int]) -> tuple[float, ...]:
    """Share of responses that are marked, per bucket of length: the veto rate by length, for one."""
    bucket = length_bucket(lengths, edges)
    return tuple(float(marked[bucket == index].double().mean()) for index in range(len(edges) + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationBin:
    """Responses whose predicted probability of success lies in one tenth."""

    count: int
    predicted: float
    observed: float


def calibration_bins(
    start_values: Tensor, correct: Tensor, *, num_bins: int = 10
) -> tuple[CalibrationBin, ...]:
    """Predicted against observed success rate in bins of p = (V(s_0) + 1) / 2.

    Args:
        start_values: [B] V(s_0).
        correct: [B] bool.
        num_bins: over [0, 1].
    """
    probability = ((start_values.double() + 1) / 2).clamp(0, 1)
    index = (probability * num_bins).floor().clamp(max=num_bins - 1).long()
    return tuple(
        CalibrationBin(
            count=int((index == number).sum()),
            predicted=float(probability[index == number].mean()),
            observed=float(correct[index == number].double().mean()),
        )
        for number in range(num_bins)
    )


def calibration_by_position(
    values: Tensor, correct: Tensor, lengths: Tensor, *, num_parts: int = 10
) -> tuple[tuple[CalibrationBin, ...], ...]:
    """`calibration_bins` of the values along the response: of V(s_0), of V at 1 / num_parts of it, ...

    Part k's value is that before token floor(k T / num_parts).

    Args:
        values: [T].
        correct: [B] bool.
        lengths: [B], all at least 1; where a response has fewer tokens than parts, some parts share a token.
        num_parts: (deciles)
    """
    starts = segment_starts(lengths)
    return tuple(
        calibration_bins(values[starts + part * lengths // num_parts], correct) for part in range(num_parts)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueByOutcome:
    """Mean value over the tokens of right and of wrong responses."""

    right: float
    wrong: float


def value_by_outcome(
    values: Tensor, correct: Tensor, lengths: Tensor, valid: Tensor | None = None
) -> ValueByOutcome:
    """How far the critic tells right responses from wrong ones.

    Args:
        values: [T].
        correct: [B] bool.
        lengths: [B].
        valid: [T] bool.
    """
    totals = segment_totals(neutralise(values, valid), lengths)
    counts = lengths.double() if valid is None else segment_sum(valid, lengths)
    right, wrong = (float(totals[chosen].sum() / counts[chosen].sum()) for chosen in (correct, ~correct))
    return ValueByOutcome(right=right, wrong=wrong)


def brier_score(probabilities: Tensor, correct: Tensor) -> float:
    """mean (p - outcome)^2 over responses."""
    return float((probabilities.double() - correct.double()).square().mean())


def ranking_quality(probabilities: Tensor, correct: Tensor) -> float:
    """AUC: chance that a right response was given a higher probability than a wrong one; ties count half."""
    right, wrong = probabilities[correct].double(), probabilities[~correct].double()
    if right.numel() == 0 or wrong.numel() == 0:
        return float("nan")
    ordered = wrong.sort().values
    below = torch.searchsorted(ordered, right, right=False)
    up_to = torch.searchsorted(ordered, right, right=True)
    return float((below + up_to).double().mean() / (2 * wrong.numel()))


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticAgreement:
    """Of two critics on the same tokens."""

    correlation: float
    mean_difference: float


def critic_agreement(first: Tensor, second: Tensor, valid: Tensor | None = None) -> CriticAgreement:
    """corr(V1, V2) and mean(V1 - V2) over valid tokens."""
    a, b = ((v if valid is None else v[valid]).detach().double() for v in (first, second))
    centred_a, centred_b = a - a.mean(), b - b.mean()
    scale = centred_a.square().sum().sqrt() * centred_b.square().sum().sqrt()
    return CriticAgreement(
        correlation=float((centred_a * centred_b).sum() / scale), mean_difference=float((a - b).mean())
    )
