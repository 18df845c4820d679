"""An ensemble value that trusts, token by token, the critic that has been right where it says what it says.

For each critic a running squared error is kept per bin of its predicted value, over responses that it was not
trained on. At a token each critic's weight is the inverse of the error of the bin its prediction falls into.

Legend: `M` critics, `B` responses, `T` packed tokens, `K` bins over [-1, 1].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from asyppo_async.algorithms.packed import compute_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationError:
    """Running squared error of each critic per bin of its own prediction."""

    errors: Tensor
    """[M, K] float64."""


def initial_calibration(num_critics: int, num_bins: int) -> CalibrationError:
    """All errors 1, the variance of a reward of +-1: equal weights until something was measured."""
    return CalibrationError(errors=torch.ones(num_critics, num_bins, dtype=torch.float64))


def prediction_bins(values: Tensor, num_bins: int) -> Tensor:
    """Index of the bin over [-1, 1] that each prediction falls into, same shape, int64; beyond the ends the
    last.
    """
    return ((values.double() + 1) / 2 * num_bins).floor().clamp(0, num_bins - 1).long()


def update_calibration(
    calibration: CalibrationError, values: Tensor, returns: Tensor, held_out: Tensor, *, rate: float
) -> CalibrationError:
    """Move each bin's error towards the batch's mean squared error in it: (1 - rate) old + rate * batch.

    Args:
        calibration: of the batches so far.
        values: [M, T].
        returns: [T].
        held_out: [M, T] bool, valid tokens of responses that the critic was not trained on. A bin without
            such a token
            keeps its error.
        rate: of the moving average, in (0, 1].
    """
    num_critics, num_bins = calibration.errors.shape
    bins = prediction_bins(torch.where(held_out, values, torch.zeros_like(values)), num_bins)
    errors = calibration.errors.clone()
    for critic in range(num_critics):
        chosen = held_out[critic]
        squares = (values[critic][chosen].double() - returns[chosen].double()).square()
        index = bins[critic][chosen]
        counts = torch.bincount(index, minlength=num_bins)
        means = torch.bincount(index, weights=squares, minlength=num_bins) / counts.clamp(min=1)
        errors[critic] = torch.where(counts > 0, (1 - rate) * errors[critic] + rate * means, errors[critic])
    return CalibrationError(errors=errors)


def confidence_value(values: Tensor, calibration: CalibrationError, *, epsilon: float = 1e-6) -> Tensor:
    """Mean over critics weighted by 1 / (error of the prediction's bin + epsilon), [M, T] -> [T]."""
    dtype = compute_dtype(values)
    bins = prediction_bins(values, calibration.errors.shape[1])
    weights = 1.0 / (calibration.errors.gather(1, bins) + epsilon)
    return ((weights * values.double()).sum(0) / weights.sum(0)).to(dtype)
