"""Mini-batches of which three ranks have different numbers of micro-batches, and garbage where nothing counts."""

from dataclasses import replace
from typing import TypeVar

import numpy as np

from asyppo_async.trainer.worker.messages import ActorTrain, CriticTrain

COUNTS = ((0, 1, 2), (3, 0, 1), (2, 3, 0), (0, 0, 3), (1, 2, 3))
"""Micro-batches of each of three ranks, by mini-batch."""
SIZES = [sum(counts) for counts in COUNTS]
Request = TypeVar("Request", ActorTrain, CriticTrain)


def with_garbage(request: Request) -> Request:
    """NaN in every token without weight."""
    nothing = np.float32(np.nan)
    if isinstance(request, ActorTrain):
        silent = (request.policy_weights == 0) & (request.entropy_weights == 0)
        without_advantage = request.policy_weights == 0
        return replace(
            request,
            advantages=np.where(without_advantage, nothing, request.advantages),
            proximal_logprobs=np.where(silent, nothing, request.proximal_logprobs),
        )
    return replace(
        request,
        targets=np.where(request.weights == 0, nothing, request.targets),
        old_values=np.where(request.weights == 0, nothing, request.old_values),
    )
