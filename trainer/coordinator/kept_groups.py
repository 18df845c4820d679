"""Finished groups that wait for their step, as arrays in a file: ids, log-probs, versions, rewards, expert routing.

Legend: `G` groups, `R` responses, `T` tokens of all responses.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyppo_async.errors import CheckpointError
from asyppo_async.trainer.coordinator.flat_arrays import flat, routed_of, routed_shapes
from asyppo_async.types import FinishReason, Group, Prompt, Response, Trajectory, VersionRuns

_REASONS: tuple[FinishReason, ...] = ("stop", "length")


def write_groups(path: Path, groups: Sequence[Group]) -> None:
    """Prompts are kept by id only: the data set has the rest."""
    rows = [trajectory for group in groups for trajectory in group.trajectories]
    responses = [row.response for row in rows]
    routed = [response.routed_experts for response in responses]
    np.savez(
        path,
        draw_ids=np.array([group.draw_id for group in groups], dtype=np.int64),
        prompt_ids=np.array([group.prompt.id for group in groups], dtype=np.str_),
        admission_versions=np.array([group.admission_version for group in groups], dtype=np.int64),
        group_finished_s=np.array([group.finished_s for group in groups], dtype=np.float64),
        group_sizes=np.array([len(group.trajectories) for group in groups], dtype=np.int64),
        sample_indices=np.array([row.sample_index for row in rows], dtype=np.int64),
        rewards=np.array([row.reward for row in rows], dtype=np.float64),
        servers=np.array([row.server for row in rows], dtype=np.str_),
        started_s=np.array([row.started_s for row in rows], dtype=np.float64),
        finished_s=np.array([row.finished_s for row in rows], dtype=np.float64),
        lengths=np.array([row.num_tokens for row in rows], dtype=np.int64),
        reasons=np.array([_REASONS.index(response.finish_reason) for response in responses], dtype=np.int8),
        token_ids=flat([response.token_ids for response in responses], np.int32),
        logprobs=flat([response.behaviour_logprobs for response in responses], np.float32),
        versions=flat([response.versions.per_token() for response in responses], np.int32),
        routed_shapes=routed_shapes(routed),
        routed=flat(routed, np.int16),
    )


def read_groups(path: Path, prompts: Mapping[str, Prompt], later_s: float) -> list[Group]:
    """What `write_groups` wrote.

    Args:
        path: The file.
        prompts: By id.
        later_s: Seconds to add to times of the clock that is gone.

    Raises:
        CheckpointError: The file is not one of these.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        return _groups(arrays, prompts, later_s)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise CheckpointError(f"{path} holds no finished groups: {error}") from error


def _groups(arrays: Mapping[str, NDArray[Any]], prompts: Mapping[str, Prompt], later_s: float) -> list[Group]:
    responses = _responses(arrays)
    groups: list[Group] = []
    ends = np.cumsum(arrays["group_sizes"])
    for index, (end, size) in enumerate(zip(ends, arrays["group_sizes"], strict=True)):
        prompt = prompts[str(arrays["prompt_ids"][index])]
        draw_id = int(arrays["draw_ids"][index])
        trajectories = tuple(
            Trajectory(
                prompt=prompt,
                draw_id=draw_id,
                sample_index=int(arrays["sample_indices"][row]),
                response=responses[row],
                reward=float(arrays["rewards"][row]),
                server=str(arrays["servers"][row]),
                started_s=float(arrays["started_s"][row]) + later_s,
                finished_s=float(arrays["finished_s"][row]) + later_s,
            )
            for row in range(end - size, end)
        )
        groups.append(
            Group(
                draw_id=draw_id,
                prompt=prompt,
                admission_version=int(arrays["admission_versions"][index]),
                trajectories=trajectories,
                finished_s=float(arrays["group_finished_s"][index]) + later_s,
            )
        )
    return groups


def _responses(arrays: Mapping[str, NDArray[Any]]) -> list[Response]:
    ends = np.cumsum(arrays["lengths"])
    routed = routed_of(arrays["routed"], arrays["routed_shapes"])
    responses = []
    for row, (end, length) in enumerate(zip(ends, arrays["lengths"], strict=True)):
        tokens = slice(end - length, end)
        responses.append(
            Response(
                token_ids=arrays["token_ids"][tokens],
                behaviour_logprobs=arrays["logprobs"][tokens],
                versions=VersionRuns.of(arrays["versions"][tokens]),
                finish_reason=_REASONS[arrays["reasons"][row]],
                routed_experts=routed[row],
            )
        )
    return responses
