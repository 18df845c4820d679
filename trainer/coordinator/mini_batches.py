"""Which responses each optimizer step sees, and what its sums are divided by.

Legend: B responses, N = sum of T response tokens, S optimizer steps.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyppo_async.algorithms.aggregation import LossAggregation, counted_tokens, denominator_of_counts
from asyppo_async.trainer.worker.messages import MiniBatches


def plan_mini_batches(
    lengths: NDArray[np.int64],
    *,
    num_per_epoch: int,
    epochs: int,
    generator: np.random.Generator,
    mode: LossAggregation,
    counted: Tensor,
    responses_counted: Tensor | None = None,
    max_length: int | None = None,
) -> MiniBatches:
    """Deal the responses anew in every epoch; each optimizer step has its own global denominator.

    Args:
        lengths: [B].
        num_per_epoch: Optimizer steps of one pass.
        epochs: Passes.
        generator: Of the order.
        mode: Of the aggregation.
        counted: [N] bool, tokens of the denominator.
        responses_counted: [N] bool, tokens that make their response count; None: `counted`.
        max_length: Longest possible response.
    """
    of_responses = torch.from_numpy(lengths)
    tokens = counted_tokens(of_responses, counted)
    present = tokens if responses_counted is None else counted_tokens(of_responses, responses_counted)
    parts: list[NDArray[np.int64]] = []
    denominators: list[float] = []
    for _ in range(epochs):
        for rows in np.array_split(generator.permutation(len(lengths)), num_per_epoch):
            parts.append(rows)
            denominators.append(
                denominator_of_counts(mode, tokens[rows], present[rows], max_length=max_length)
            )
    return MiniBatches(
        sequence_indices=np.concatenate(parts).astype(np.int32),
        sizes=np.array([len(rows) for rows in parts], dtype=np.int32),
        denominators=np.array(denominators, dtype=np.float64),
    )


def counts_of_steps(mini_batches: MiniBatches, per_response: NDArray[np.int64]) -> NDArray[np.float64]:
    """[S] sums of a count per response, [B], over the responses of each optimizer step."""
    return np.array([per_response[rows].sum() for rows in rows_of_steps(mini_batches)], dtype=np.float64)


def rows_of_steps(mini_batches: MiniBatches) -> Iterator[NDArray[np.int32]]:
    """The responses of each optimizer step in turn."""
    ends = mini_batches.sizes.astype(np.int64).cumsum()
    for end, size in zip(ends, mini_batches.sizes, strict=True):
        yield mini_batches.sequence_indices[end - size : end]
