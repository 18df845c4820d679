"""Single responses token by token, with everything that was decided about each token: `traces.jsonl`."""

from collections.abc import Callable, Sequence

import numpy as np

from asyppo_async.algorithms.token_classes import TokenClass
from asyppo_async.trainer.coordinator.step import StepResult
from asyppo_async.trainer.run_folder import Row
from asyppo_async.types import Float32Array


def trace_rows(result: StepResult, decode: Callable[[Sequence[int]], str], count: int) -> list[Row]:
    """The best and the worst response of the batch's first group, then those between, at most `count`.

    Arrays are [T]; `values` is [M, T], the critics' V before each token.
    """
    if count == 0 or not len(result.values) or not result.batch.groups:
        return []
    group = result.batch.groups[0]
    ranked = sorted(range(len(group.trajectories)), key=lambda index: -group.trajectories[index].reward)
    chosen = [ranked[-(place // 2) - 1] if place % 2 else ranked[place // 2] for place in range(len(ranked))]
    return [_row(result, index, decode) for index in chosen[:count]]


def _row(result: StepResult, index: int, decode: Callable[[Sequence[int]], str]) -> Row:
    """Of the response at `index` of the batch."""
    one = result.batch.groups[0].trajectories[index]
    start = int(result.batch.lengths[:index].sum())
    tokens = slice(start, start + one.num_tokens)
    decisions, masks = result.decisions, result.decisions.std_masks
    return {
        "step": result.batch.step,
        "prompt_id": one.prompt.id,
        "task": one.prompt.task,
        "prompt": one.prompt.text,
        "answer": one.prompt.answer,
        "reward": one.reward,
        "tokens": [decode([token]) for token in one.response.token_ids.tolist()],
        "values": [_rounded(own) for own in result.values[:, tokens]],
        "advantages": _rounded(decisions.advantages[tokens].numpy()),
        "std": _rounded(decisions.value_std[tokens].numpy()),
        "log_ratio": _rounded(decisions.mismatch.log_ratio[tokens].numpy()),
        "class": [TokenClass(kind).name.lower() for kind in decisions.classes[tokens].tolist()],
        "advantage_masked": (~masks.advantage_keep[tokens]).tolist(),
        "entropy_filtered": (~masks.entropy_keep[tokens]).tolist(),
        "versions": one.response.versions.per_token().tolist(),
    }


def _rounded(values: Float32Array) -> list[float]:
    return [float(value) for value in np.round(values.astype(np.float64), 5)]
