"""What a step's row holds of the critics beside single numbers: ages, values along the response, chosen tokens."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from asyppo_async.algorithms.calibration import calibration_by_position, mean_by_position
from asyppo_async.algorithms.packed import spread
from asyppo_async.trainer.coordinator.step import StepResult

NUM_TENTHS = 10
NUM_TOKENS = 10
"""Most frequent tokens that are listed."""


def critic_version(result: StepResult) -> int:
    """Of the critics that the advantages were made with: training steps whose batches they had learned."""
    algorithm = result.algorithm
    from_before = (algorithm.advantage_values or algorithm.schedule) == "pre"
    return result.batch.step + (0 if from_before else 1)


def critic_record(result: StepResult, decode: Callable[[Sequence[int]], str]) -> dict[str, object]:
    """Lists for `metrics.jsonl`; empty for a method without critics.

    `critic_age_histogram_responses`: responses by (critics' version - version of their oldest token).
    `value_of_right_by_tenth`, `..wrong..`: mean value over the critics in each tenth of right and wrong responses.
    `calibration_by_decile_count`, `.._predicted`, `.._observed`: for each decile of the response, for each tenth of the
    success rate that the mean over the critics predicts there: responses, their mean prediction, their success rate.
    `tokens_masked`, `tokens_filtered`: most frequent tokens that AsyPPO's masks chose, with their counts.
    """
    if not len(result.values):
        return {}
    batch = result.batch
    lengths = torch.from_numpy(batch.lengths)
    starts = np.cumsum(batch.lengths) - batch.lengths
    oldest = np.minimum.reduceat(batch.versions, starts)
    version = critic_version(result)
    values = torch.from_numpy(result.values.mean(axis=0, dtype=np.float64))
    right = spread(torch.from_numpy(batch.correct), lengths)
    ranked = result.decisions.masks.ranking
    masks = result.decisions.std_masks
    bins = calibration_by_position(values, torch.from_numpy(batch.correct), lengths, num_parts=NUM_TENTHS)
    return {
        "critic_version": version,
        "critic_age_histogram_responses": np.bincount(version - oldest).astype(float).tolist(),
        "value_of_right_by_tenth": list(mean_by_position(values, lengths, num_parts=NUM_TENTHS, valid=right)),
        "value_of_wrong_by_tenth": list(
            mean_by_position(values, lengths, num_parts=NUM_TENTHS, valid=~right)
        ),
        **{
            f"calibration_by_decile_{kind}": [
                [float(getattr(one, kind)) for one in decile] for decile in bins
            ]
            for kind in ("count", "predicted", "observed")
        },
        "tokens_masked": _frequent(result, (ranked & ~masks.advantage_keep).numpy(), decode),
        "tokens_filtered": _frequent(result, (ranked & ~masks.entropy_keep).numpy(), decode),
    }


def _frequent(
    result: StepResult, chosen: NDArray[np.bool_], decode: Callable[[Sequence[int]], str]
) -> list[list[object]]:
    counts = Counter(result.batch.sequences.response_token_ids[chosen].tolist())
    return [[decode([token]), count] for token, count in counts.most_common(NUM_TOKENS)]
