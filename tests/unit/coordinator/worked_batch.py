"""The worked batch of AsyPPO (two groups of two responses) and the groups that carry it."""

import numpy as np

from asyppo_async.types import Group, Prompt, Response, Trajectory, VersionRuns

LENGTHS = [3, 2, 4, 1]
REWARDS = [1.0, -1.0, 1.0, -1.0]
VALUES = [
    [0.10, 0.30, 0.60, -0.2, -0.5, 0.0, 0.2, 0.4, 0.7, -0.1],
    [0.20, 0.26, 0.10, -0.6, -0.52, 0.3, 0.25, 0.96, 0.58, 0.7],
]
VALUE_STD = [0.05, 0.02, 0.25, 0.2, 0.01, 0.15, 0.025, 0.28, 0.06, 0.4]
ADVANTAGES = [0.85, 0.72, 0.65, -0.6, -0.49, 0.85, 0.775, 0.32, 0.36, -1.3]
ADVANTAGE_KEEP = [1, 0, 1, 1, 0, 1, 1, 1, 1, 1]
ENTROPY_KEEP = [1, 1, 1, 1, 1, 1, 1, 0, 1, 0]


def make_group(
    draw_id: int,
    lengths: list[int],
    rewards: list[float],
    *,
    version: int = 0,
    logprobs: list[float] | None = None,
    versions: list[int] | None = None,
) -> Group:
    """A group of a made-up prompt whose responses have the given lengths."""
    prompt = Prompt(id=f"p{draw_id}", task="test", text="ab", token_ids=(5, 6), answer="")
    total = sum(lengths)
    flat_logprobs = np.array(logprobs if logprobs is not None else [-0.5] * total, dtype=np.float32)
    flat_versions = np.array(versions if versions is not None else [version] * total, dtype=np.int32)
    bounds = np.cumsum([0, *lengths])
    trajectories = tuple(
        Trajectory(
            prompt=prompt,
            draw_id=draw_id,
            sample_index=index,
            response=Response(
                token_ids=np.arange(length, dtype=np.int32),
                behaviour_logprobs=flat_logprobs[bounds[index] : bounds[index + 1]],
                versions=VersionRuns.of(flat_versions[bounds[index] : bounds[index + 1]]),
                finish_reason="stop",
            ),
            reward=reward,
            server="test",
            started_s=0.0,
            finished_s=1.0,
        )
        for index, (length, reward) in enumerate(zip(lengths, rewards, strict=True))
    )
    return Group(
        draw_id=draw_id, prompt=prompt, admission_version=version, trajectories=trajectories, finished_s=1.0
    )


def worked_groups() -> list[Group]:
    return [make_group(0, LENGTHS[:2], REWARDS[:2]), make_group(1, LENGTHS[2:], REWARDS[2:])]
