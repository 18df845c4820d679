"""A critic as process reward: which of several responses, or of several beginnings, it thinks best.

    last   V at the last state before the end
    mean   of V over the states of the response
    min    of V over the states of the response: the weakest step decides

Legend: `T` tokens of a response.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Score = Literal["last", "mean", "min"]
SCORES: tuple[Score, ...] = get_args(Score)


def score_of(values: NDArray[np.float32], how: Score) -> float:
    """Of one response, from its [T] values."""
    if not len(values):
        raise ValueError("a response without tokens has no value")
    match how:
        case "last":
            return float(values[-1])
        case "mean":
            return float(values.mean(dtype=np.float64))
        case "min":
            return float(values.min())


def choose_best(values: Sequence[NDArray[np.float32]], how: Score) -> int:
    """Index of the response with the highest score; of equal ones the first."""
    return int(np.argmax([score_of(own, how) for own in values]))


def majority(answers: Sequence[str | None]) -> int:
    """Index of the first response with the most frequent answer; None is no vote. Of equal counts the earliest answer.

    0 where nobody voted.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0
    top = max(votes.values())
    return next(index for index, answer in enumerate(answers) if answer is not None and votes[answer] == top)


def keep_best(scores: Sequence[float], num_kept: int) -> list[int]:
    """Indices of the highest scores, best first; of equal ones the earlier."""
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:num_kept]
