"""The groups of one training step, laid end to end (legend: B responses, N = sum of T response tokens)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from asyppo_async.algorithms.critics import split_groups
from asyppo_async.types import Float32Array, Group, Int32Array, TokenSequences, concatenate_sequences

CriticData = Literal["group_split", "random_split", "shared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What the arithmetic of a step reads."""

    step: int
    """Trainer version at the start of the step."""
    groups: tuple[Group, ...]
    sequences: TokenSequences
    rewards: Float32Array
    """[B]"""
    behaviour_logprobs: Float32Array
    """[N]"""
    versions: Int32Array
    """[N]"""
    critic_shares: tuple[NDArray[np.int64], ...]
    """For each critic the indices of the responses that it trains on."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[B] response tokens."""
        return self.sequences.response_lengths.astype(np.int64)


def build_batch(
    step: int, groups: Sequence[Group], *, num_critics: int, critic_data: CriticData, seed: int
) -> Batch:
    """Lay the responses of `groups` end to end and deal them to the critics."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return Batch(
        step=step,
        groups=tuple(groups),
        sequences=concatenate_sequences(
            [(trajectory.prompt.token_ids, trajectory.response.token_ids) for trajectory in trajectories]
        ),
        rewards=np.array([trajectory.reward for trajectory in trajectories], dtype=np.float32),
        behaviour_logprobs=np.concatenate(
            [trajectory.response.behaviour_logprobs for trajectory in trajectories]
        ),
        versions=np.concatenate([trajectory.response.versions for trajectory in trajectories]),
        critic_shares=_deal(step, groups, num_critics=num_critics, critic_data=critic_data, seed=seed),
    )


def _deal(
    step: int, groups: Sequence[Group], *, num_critics: int, critic_data: CriticData, seed: int
) -> tuple[NDArray[np.int64], ...]:
    members = [(group, trajectory) for group in groups for trajectory in group.trajectories]
    everything = np.arange(len(members), dtype=np.int64)
    if critic_data == "shared":
        return (everything,) * num_critics
    # A random split is the group split of one single group: balanced over the batch, blind to prompts.
    by_group = critic_data == "group_split"
    critic_of = split_groups(
        [trajectory.prompt.id for _, trajectory in members],
        [group.draw_id if by_group else 0 for group, _ in members],
        [trajectory.sample_index if by_group else row for row, (_, trajectory) in enumerate(members)],
        num_critics=num_critics,
        seed=seed,
        step=step,
    ).numpy()
    return tuple(everything[critic_of == critic] for critic in range(num_critics))


def select_sequences(sequences: TokenSequences, rows: NDArray[np.int64]) -> TokenSequences:
    """The sequences at `rows`, in that order."""
    prompts = np.split(sequences.prompt_token_ids, np.cumsum(sequences.prompt_lengths)[:-1])
    responses = np.split(sequences.response_token_ids, np.cumsum(sequences.response_lengths)[:-1])
    return concatenate_sequences([(prompts[row], responses[row]) for row in rows])


def token_rows(lengths: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Flat indices of the tokens of the responses at `rows`, in that order."""
    starts = np.cumsum(lengths) - lengths
    empty = np.zeros(0, dtype=np.int64)
    return np.concatenate([empty, *(np.arange(starts[row], starts[row] + lengths[row]) for row in rows)])
