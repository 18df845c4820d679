"""What is measured about ratios, values and staleness. Plain numbers, nothing with a gradient.

Sums are taken in float64. A statistic of nothing is NaN. Legend: `B` responses, `T` packed tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyppo_async.algorithms.mismatch import ratio
from asyppo_async.algorithms.packed import (
    compute_dtype,
    neutralise,
    segment_extremes,
    segment_sum,
    segment_totals,
)

PART_TOKENS = 1 << 20


def _chosen(values: Tensor, valid: Tensor | None) -> Tensor:
    return values.detach().double() if valid is None else values.detach()[valid].double()


def kl_k1(log_ratio: Tensor, valid: Tensor | None = None) -> float:
    """mean(-log ratio): estimates KL(sampler || other), unbiased, may be negative on a sample.

    The sampler is the denominator of the ratio: KL(mu || pi_old) from log rho, KL(pi_old || pi_theta) from
    log r.
    """
    return float((-_chosen(log_ratio, valid)).mean())


def kl_k2(log_ratio: Tensor, valid: Tensor | None = None) -> float:
    """mean(log ratio squared) / 2."""
    return float(_chosen(log_ratio, valid).square().mean() / 2)


def kl_k3(log_ratio: Tensor, valid: Tensor | None = None) -> float:
    """mean(ratio - 1 - log ratio): the same KL as k1, unbiased and never negative."""
    logs = _chosen(log_ratio, valid)
    return float((ratio(logs) - 1 - logs).mean())


def effective_sample_size(log_ratio: Tensor, valid: Tensor | None = None) -> float:
    """(sum w)^2 / (N sum w^2), in (0, 1]: the share of tokens that the weights leave."""
    weights = ratio(_chosen(log_ratio, valid))
    return float(weights.sum().square() / (weights.numel() * weights.square().sum()))


def chi_square(log_ratio: Tensor, valid: Tensor | None = None) -> float:
    """mean(w^2) - 1."""
    return float(ratio(_chosen(log_ratio, valid)).square().mean() - 1)


def perplexity_ratio(log_ratio: Tensor, valid: Tensor | None = None) -> float:
    """exp(-mean log ratio)."""
    return float(torch.exp(-_chosen(log_ratio, valid).mean()))


def quantiles(values: Tensor, at: Sequence[float], valid: Tensor | None = None) -> tuple[float, ...]:
    """Quantiles with linear interpolation (numpy), of any number of values; each NaN if there is none."""
    chosen = values.detach() if valid is None else values.detach()[valid]
    if chosen.numel() == 0:
        return tuple(float("nan") for _ in at)
    found = np.quantile(chosen.to(compute_dtype(chosen)).numpy(), list(at))
    return tuple(float(value) for value in found)


def value_std_quantiles(std: Tensor, valid: Tensor | None = None) -> tuple[float, ...]:
    """.1, .2, .5, .8 and .9 quantile of the value std."""
    return quantiles(std, (0.1, 0.2, 0.5, 0.8, 0.9), valid)


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioStatistics:
    """Of one ratio over a set of tokens."""

    num_tokens: int
    mean: float
    minimum: float
    p1: float
    p99: float
    maximum: float
    effective_sample_size: float
    chi_square: float
    kl_k1: float
    kl_k3: float

    @property
    def perplexity_ratio(self) -> float:
        """exp(-mean log ratio)."""
        return float(torch.tensor(self.kl_k1, dtype=torch.float64).exp())


def ratio_statistics(log_ratio: Tensor, valid: Tensor | None = None) -> RatioStatistics:
    """All figures of a ratio at once, over the valid tokens with a finite log ratio, before any rejection.

    Sums go through the tokens in parts, so that the float64 copies stay small.
    """
    finite = torch.isfinite(log_ratio)
    measured = finite if valid is None else finite & valid
    logs = log_ratio.detach() if bool(measured.all()) else log_ratio.detach()[measured]
    sums = torch.zeros(4, dtype=torch.float64)
    for part in torch.split(logs, PART_TOKENS):
        exact = part.double()
        weights = ratio(exact)
        sums += torch.stack([weights.sum(), weights.square().sum(), exact.sum(), (weights - 1 - exact).sum()])
    count = logs.numel()
    total, squares, log_sum, k3_sum = sums.tolist()
    nothing = float("nan")
    all_ratios = ratio(logs.to(compute_dtype(logs)))
    p1, p99 = quantiles(all_ratios, (0.01, 0.99))
    minimum, maximum = map(float, torch.aminmax(all_ratios)) if count else (nothing, nothing)
    return RatioStatistics(
        num_tokens=count,
        mean=total / count if count else nothing,
        minimum=minimum,
        p1=p1,
        p99=p99,
        maximum=maximum,
        effective_sample_size=total**2 / (count * squares) if count else nothing,
        chi_square=squares / count - 1 if count else nothing,
        kl_k1=-log_sum / count if count else nothing,
        kl_k3=k3_sum / count if count else nothing,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedVarianceSums:
    """Sums from which explained variance, bias and squared error follow; those of two parts may be added.

    (The mean of two parts' explained variances is not the explained variance of the whole.)
    """

    count: int
    returns: float
    returns_squared: float
    errors: float
    errors_squared: float

    def __add__(self, other: "ExplainedVarianceSums") -> "ExplainedVarianceSums":
        return ExplainedVarianceSums(
            count=self.count + other.count,
            returns=self.returns + other.returns,
            returns_squared=self.returns_squared + other.returns_squared,
            errors=self.errors + other.errors,
            errors_squared=self.errors_squared + other.errors_squared,
        )

    @classmethod
    def of(cls, sums: Tensor) -> "ExplainedVarianceSums":
        """Of the five sums in the order of the fields."""
        count, returns, returns_squared, errors, errors_squared = sums.tolist()
        return cls(
            count=int(count),
            returns=returns,
            returns_squared=returns_squared,
            errors=errors,
            errors_squared=errors_squared,
        )

    @property
    def explained_variance(self) -> float:
        """1 - Var(G - V) / Var(G); NaN if the returns do not vary. Blind to a constant shift of V."""
        if self.count == 0:
            return float("nan")
        variance = self.returns_squared / self.count - (self.returns / self.count) ** 2
        if variance <= 1e-12 * max(1.0, self.returns_squared / self.count):
            return float("nan")
        error_variance = self.errors_squared / self.count - (self.errors / self.count) ** 2
        return 1.0 - error_variance / variance

    @property
    def bias(self) -> float:
        """mean(G - V)."""
        return self.errors / self.count if self.count else float("nan")

    @property
    def mean_squared_error(self) -> float:
        return self.errors_squared / self.count if self.count else float("nan")


def explained_variance_sums(
    returns: Tensor, values: Tensor, valid: Tensor | None = None
) -> ExplainedVarianceSums:
    """The sums over valid tokens, in float64; what is not valid may hold NaN."""
    everything = valid is None or bool(valid.all())
    chosen_returns, chosen_values = (
        tensor.detach() if everything or valid is None else tensor.detach()[valid]
        for tensor in (returns, values)
    )
    sums = torch.zeros(4, dtype=torch.float64)
    for part, predicted in zip(
        torch.split(chosen_returns, PART_TOKENS), torch.split(chosen_values, PART_TOKENS), strict=True
    ):
        exact = part.double()
        errors = exact - predicted.double()
        sums += torch.stack([exact.sum(), exact.square().sum(), errors.sum(), errors.square().sum()])
    return_sum, return_squares, error_sum, error_squares = sums.tolist()
    return ExplainedVarianceSums(
        count=chosen_returns.numel(),
        returns=return_sum,
        returns_squared=return_squares,
        errors=error_sum,
        errors_squared=error_squares,
    )


def explained_variance_segments(
    returns: Tensor, values: Tensor, lengths: Tensor, valid: Tensor | None = None
) -> Tensor:
    """The sums of each of many segments that lie end to end, [S, 5] float64, in the order of the fields.

    Args:
        returns: [T]; what is not valid may hold NaN, as in `values`.
        values: [T].
        lengths: [S], of the segments; they may be empty.
        valid: [T] bool.
    """
    known = neutralise(returns, valid).double()
    counts = lengths.double() if valid is None else segment_sum(valid, lengths)
    sums = [counts, segment_totals(known, lengths), segment_totals(known.square(), lengths)]
    errors = known - neutralise(values, valid)
    sums += [segment_totals(errors, lengths), segment_totals(errors.square(), lengths)]
    return torch.stack(sums, 1)


def explained_variance(returns: Tensor, values: Tensor, valid: Tensor | None = None) -> float:
    """1 - Var(G - V) / Var(G) over valid tokens; NaN if the returns do not vary."""
    return explained_variance_sums(returns, values, valid).explained_variance


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessStatistics:
    """Age of a batch in versions; of a response: of its oldest token."""

    token_histogram: tuple[int, ...]
    """Number of tokens with staleness 0, 1, 2, ..."""
    sequence_histogram: tuple[int, ...]
    mean: float
    """Over tokens."""
    maximum: int
    mixed_share: float
    """Share of responses that several versions sampled."""


def staleness_statistics(
    versions: Tensor, lengths: Tensor, trainer_version: int, valid: Tensor | None = None
) -> StalenessStatistics:
    """Histograms of staleness = trainer version at the start of the step minus the version of the token.

    Args:
        versions: [T] int, version that sampled each token.
        lengths: [B].
        trainer_version: at the start of the step.
        valid: [T] bool; what is false is not counted.
    """
    ages = (trainer_version - versions).to(torch.int32)
    if valid is not None:
        ages, lengths = ages[valid], segment_sum(valid, lengths).to(torch.int64)
    newest, oldest = segment_extremes(ages, lengths)
    if newest.numel() and int(newest.min()) < 0:
        raise ValueError(
            f"a token of version {trainer_version - int(newest.min())} is newer than trainer {trainer_version}"
        )
    histogram = torch.bincount(ages).tolist()
    total = sum(age * number for age, number in enumerate(histogram))
    return StalenessStatistics(
        token_histogram=tuple(histogram),
        sequence_histogram=tuple(torch.bincount(oldest).tolist()),
        mean=total / len(ages) if len(ages) else float("nan"),
        maximum=max(0, len(histogram) - 1),
        mixed_share=float((oldest != newest).double().mean()),
    )
