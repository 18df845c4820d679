"""The groups of one training step, laid end to end (legend: B responses, N = sum of T response tokens)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from asyppo_async.algorithms.critics import split_groups
from asyppo_async.algorithms.group_advantages import overlong_penalty
from asyppo_async.config.algorithm import AlgorithmSection
from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import FleetMismatch
from asyppo_async.types import (
    BoolArray,
    Float32Array,
    Group,
    Int16Array,
    Int32Array,
    TokenSequences,
    Trajectory,
    concatenate_sequences,
)

Number = TypeVar("Number", bound=np.generic)
CriticData = Literal["group_split", "random_split", "shared"]
SmallGroups = Literal["rotate", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """What is done to the verdict of a response before it is learned from."""

    truncated_reward: float | None
    """Reward of a response at maximum length; None: what its text earned."""
    overlong_cache_tokens: int
    """0: no penalty for long responses."""
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What the arithmetic of a step reads."""

    step: int
    """Trainer version at the start of the step."""
    groups: tuple[Group, ...]
    sequences: TokenSequences
    rewards: Float32Array
    """[B] as scored: what verdicts and metrics are about."""
    shaped_rewards: Float32Array
    """[B] what advantages and critics learn from."""
    truncated: BoolArray
    """[B] ended at maximum length."""
    behaviour_logprobs: Float32Array
    """[N]"""
    versions: Int32Array
    """[N]"""
    critic_shares: tuple[NDArray[np.int64], ...]
    """For each critic the indices of the responses that it trains on."""
    routed_experts: Int16Array | None = None
    """[sum (P + T - 1), layers, experts per token] that the engine used; None: not replayed."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[B] response tokens."""
        return self.sequences.response_lengths.astype(np.int64)

    @property
    def group_ids(self) -> NDArray[np.int64]:
        """[B] position of each response's group in the batch."""
        return np.repeat(np.arange(len(self.groups)), [len(group.trajectories) for group in self.groups])

    @property
    def correct(self) -> BoolArray:
        """[B] the binary verdict."""
        return np.asarray(self.rewards >= 1)

    def trained_on(self) -> BoolArray:
        """[M, B] which responses each critic trains on."""
        seen = np.zeros((len(self.critic_shares), len(self.rewards)), dtype=np.bool_)
        for critic, rows in enumerate(self.critic_shares):
            seen[critic, rows] = True
        return seen


def truncated_reward(algorithm: AlgorithmSection) -> float | None:
    """Verdict on a response at maximum length; None: what its text earns."""
    return -1.0 if algorithm.truncated == "finished" else None


def batch_of(step: int, groups: Sequence[Group], config: TrainConfig) -> Batch:
    """`build_batch` as a run's settings say."""
    algorithm, critic = config.algorithm, config.critic
    return build_batch(
        step,
        groups,
        num_critics=critic.count,
        critic_data=critic.data,
        small_groups=critic.small_groups,
        seed=config.run.seed,
        shaping=Shaping(
            truncated_reward=truncated_reward(algorithm),
            overlong_cache_tokens=algorithm.overlong_cache_tokens,
            max_tokens=config.sampling.max_tokens,
        ),
        routing_replay=config.actor.routing_replay,
    )


def build_batch(
    step: int,
    groups: Sequence[Group],
    *,
    num_critics: int,
    critic_data: CriticData,
    seed: int,
    small_groups: SmallGroups = "rotate",
    shaping: Shaping | None = None,
    routing_replay: bool = False,
) -> Batch:
    """Lay the responses of `groups` end to end and deal them to the critics."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = np.array([trajectory.reward for trajectory in trajectories], dtype=np.float32)
    truncated = np.array(
        [trajectory.response.finish_reason == "length" for trajectory in trajectories], dtype=np.bool_
    )
    lengths = np.array([trajectory.num_tokens for trajectory in trajectories], dtype=np.int64)
    return Batch(
        step=step,
        groups=tuple(groups),
        sequences=concatenate_sequences(
            [(trajectory.prompt.token_ids, trajectory.response.token_ids) for trajectory in trajectories]
        ),
        rewards=rewards,
        shaped_rewards=rewards if shaping is None else _shape(rewards, truncated, lengths, shaping),
        truncated=truncated,
        behaviour_logprobs=np.concatenate(
            [trajectory.response.behaviour_logprobs for trajectory in trajectories]
        ),
        versions=np.concatenate([trajectory.response.versions.per_token() for trajectory in trajectories]),
        critic_shares=_deal(
            step,
            groups,
            num_critics=num_critics,
            critic_data=critic_data,
            small_groups=small_groups,
            seed=seed,
        ),
        routed_experts=_routing_of(trajectories) if routing_replay else None,
    )


def _routing_of(trajectories: Sequence[Trajectory]) -> Int16Array:
    """The experts of all responses end to end.

    Raises:
        FleetMismatch: a response came without them, or with those of too few positions.
    """
    parts = []
    for trajectory in trajectories:
        routed = trajectory.response.routed_experts
        num_fed = len(trajectory.prompt.token_ids) + trajectory.num_tokens - 1
        if routed is None or len(routed) != num_fed:
            raise FleetMismatch(
                f"{trajectory.server} fed {num_fed} tokens of prompt {trajectory.prompt.id} and returned the experts "
                f"of {0 if routed is None else len(routed)}; actor.routing_replay needs all of them: use an engine "
                "that returns its routing, or set actor.routing_replay = false"
            )
        parts.append(routed)
    return np.concatenate(parts)


def _shape(
    rewards: Float32Array, truncated: BoolArray, lengths: NDArray[np.int64], shaping: Shaping
) -> Float32Array:
    shaped = rewards.astype(np.float64)
    if shaping.truncated_reward is not None:
        shaped = np.where(truncated, shaping.truncated_reward, shaped)
    if shaping.overlong_cache_tokens > 0:
        shaped += overlong_penalty(
            torch.from_numpy(lengths), max_length=shaping.max_tokens, cache=shaping.overlong_cache_tokens
        ).numpy()
    return shaped.astype(np.float32)


def _deal(
    step: int,
    groups: Sequence[Group],
    *,
    num_critics: int,
    critic_data: CriticData,
    small_groups: SmallGroups,
    seed: int,
) -> tuple[NDArray[np.int64], ...]:
    if num_critics == 0:
        return ()
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
    by_all = np.array(
        [small_groups == "all" and len(group.trajectories) < num_critics for group, _ in members],
        dtype=np.bool_,
    )
    return tuple(everything[(critic_of == critic) | by_all] for critic in range(num_critics))


def select_sequences(sequences: TokenSequences, rows: NDArray[np.int64]) -> TokenSequences:
    """The sequences at `rows`, in that order."""
    prompts = np.split(sequences.prompt_token_ids, np.cumsum(sequences.prompt_lengths)[:-1])
    responses = np.split(sequences.response_token_ids, np.cumsum(sequences.response_lengths)[:-1])
    return concatenate_sequences([(prompts[row], responses[row]) for row in rows])


def tokens_of(
    per_token: NDArray[Number], lengths: NDArray[np.int64], rows: NDArray[np.int64]
) -> NDArray[Number]:
    """The tokens of the responses at `rows`, in that order: slices, since an index would take 8 bytes a token."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    return np.concatenate([per_token[:0], *(per_token[starts[row] : ends[row]] for row in rows)])


def with_end_states(sequences: TokenSequences, truncated: BoolArray) -> tuple[TokenSequences, BoolArray]:
    """The sequences with one token more behind each truncated response, and which tokens those are, [N + extra] bool.

    The value before that token is V(s_T) of the response.
    """
    lengths = sequences.response_lengths.astype(np.int64)
    ends = np.cumsum(lengths)[truncated]
    extra = np.insert(np.zeros(sequences.num_response_tokens, dtype=np.bool_), ends, True)
    return (
        TokenSequences(
            prompt_token_ids=sequences.prompt_token_ids,
            prompt_lengths=sequences.prompt_lengths,
            response_token_ids=np.insert(sequences.response_token_ids, ends, 0),
            response_lengths=sequences.response_lengths + truncated.astype(np.int32),
        ),
        extra,
    )
