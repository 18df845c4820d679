"""The advantages of a batch, by the configured estimator.

Legend: B responses, N = sum of T response tokens, M critics.
"""

from dataclasses import dataclass
from typing import assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyppo_async.algorithms.advantages import gae, length_adaptive_lambda, whiten
from asyppo_async.algorithms.confidence import confidence_value, initial_calibration, update_calibration
from asyppo_async.algorithms.critic_data import crossfit_value
from asyppo_async.algorithms.critic_parts import prompt_advantages, token_advantages
from asyppo_async.algorithms.critics import ensemble_value
from asyppo_async.algorithms.evpo import gated_advantages
from asyppo_async.algorithms.group_advantages import (
    dr_grpo,
    flash_reinforce,
    grpo,
    prior_advantages,
    reinforce_plus_plus,
    rloo,
    whiten_groups,
)
from asyppo_async.algorithms.packed import spread
from asyppo_async.algorithms.sequence_losses import group_entropy
from asyppo_async.algorithms.truncation import EpisodeEnds, episode_ends
from asyppo_async.algorithms.trust_masks import gepo_entropy_scale, track_entropy
from asyppo_async.config.algorithm import AlgorithmSection
from asyppo_async.trainer.coordinator.batch import Batch
from asyppo_async.trainer.coordinator.memory import StepMemory
from asyppo_async.types import Float32Array

_GEPO_LOW_WIDTH, _GEPO_HIGH_WIDTH = 0.2, 0.3
_GEPO_LOW_FACTOR, _GEPO_HIGH_FACTOR = 0.5, 0.2
_GEPO_RATE = 0.01
"""Constants of GEPO (2607.16850)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """What rewards are compared with."""

    values: NDArray[np.float32]
    """[M, N]; M may be 0."""
    end_values: NDArray[np.float32] | None = None
    """[M, B] V(s_T), under `truncated = bootstrap`."""
    priors: NDArray[np.float64] | None = None
    """[B] running success rate of the prompt before each response (SPO)."""
    reference_logprobs: Float32Array | None = None
    """[N] of the frozen reference; read where its KL is a cost in the advantages."""


def advantages_of(
    batch: Batch,
    baselines: Baselines,
    algorithm: AlgorithmSection,
    *,
    counted: Tensor,
    memory: StepMemory,
) -> Tensor:
    """[N] advantages; whitened, not yet scaled by entropy.

    Args:
        batch: The batch.
        baselines: See there.
        algorithm: The section of that name.
        counted: [N] bool, tokens of groups that are not filtered.
        memory: Of the steps before.
    """
    lengths, group_ids = torch.from_numpy(batch.lengths), torch.from_numpy(batch.group_ids)
    rewards = torch.from_numpy(batch.shaped_rewards)
    match algorithm.estimator:
        case "gae" | "evpo":
            advantages = _from_critics(batch, baselines, algorithm, counted=counted, memory=memory)
        case "grpo":
            advantages = spread(
                grpo(
                    rewards,
                    group_ids,
                    unbiased=algorithm.group_std_unbiased,
                    singleton=algorithm.group_singleton,
                ),
                lengths,
            )
        case "dr_grpo":
            advantages = spread(dr_grpo(rewards, group_ids), lengths)
        case "rloo":
            advantages = spread(rloo(rewards, group_ids), lengths)
        case "reinforce_pp" | "reinforce_pp_baseline":
            advantages = reinforce_plus_plus(
                rewards,
                lengths,
                group_ids=group_ids if algorithm.estimator == "reinforce_pp_baseline" else None,
                valid=counted,
                unbiased=algorithm.whiten_unbiased,
            )
        case "flash_reinforce":
            advantages = spread(flash_reinforce(rewards), lengths)
        case "spo":
            if baselines.priors is None:
                raise ValueError("spo needs the running value of each prompt, got None")
            advantages = spread(
                prior_advantages((rewards + 1) / 2, torch.from_numpy(baselines.priors)), lengths
            )
        case _:
            assert_never(algorithm.estimator)
    if algorithm.whiten_advantages == "batch":
        return whiten(advantages, counted, unbiased=algorithm.whiten_unbiased)
    if algorithm.whiten_advantages == "group":
        return whiten_groups(advantages, lengths, group_ids, counted, unbiased=algorithm.whiten_unbiased)
    return advantages


def _from_critics(
    batch: Batch,
    baselines: Baselines,
    algorithm: AlgorithmSection,
    *,
    counted: Tensor,
    memory: StepMemory,
) -> Tensor:
    lengths = torch.from_numpy(batch.lengths)
    values = baseline_values(batch, torch.from_numpy(baselines.values), algorithm, memory)
    ends = ends_of(batch, values, algorithm, baselines.end_values)
    if algorithm.critic_use == "prompt":
        return prompt_advantages(ends.rewards, values, lengths)
    if algorithm.estimator == "evpo":
        return gated_advantages(
            spread(ends.rewards, lengths),
            values,
            lengths,
            valid=counted,
            group_ids=torch.from_numpy(batch.group_ids) if algorithm.evpo_mean == "group" else None,
            threshold=algorithm.evpo_threshold,
        ).advantages
    lambda_ = (
        actor_lambda(lengths, algorithm) if algorithm.lambda_actor == "adaptive" else algorithm.lambda_actor
    )
    advantages = gae(ends.rewards, values, lengths, lambda_, bootstrap_values=ends.bootstrap_values)
    if algorithm.critic_use == "token":
        return token_advantages(advantages, ends.rewards, lengths)
    return advantages


def actor_lambda(lengths: Tensor, algorithm: AlgorithmSection) -> Tensor:
    """[B] lambda of each response's advantages."""
    if algorithm.lambda_actor == "adaptive":
        return length_adaptive_lambda(lengths, algorithm.lambda_alpha)
    return torch.full(lengths.shape, algorithm.lambda_actor)


def baseline_values(batch: Batch, values: Tensor, algorithm: AlgorithmSection, memory: StepMemory) -> Tensor:
    """[N] one value per token out of [M, N]."""
    if algorithm.advantage_values == "crossfit":
        return crossfit_value(values, torch.from_numpy(batch.trained_on()), torch.from_numpy(batch.lengths))
    if algorithm.value_aggregation == "confidence":
        known = memory.calibration or initial_calibration(len(values), algorithm.calibration_bins)
        return confidence_value(values, known)
    return ensemble_value(values, algorithm.value_aggregation)


def ends_of(
    batch: Batch,
    values: Tensor,
    algorithm: AlgorithmSection,
    end_values: NDArray[np.float32] | None,
) -> EpisodeEnds:
    """Rewards and V(s_T) of the responses; -1 of `finished` is in the shaped rewards already."""
    rewards = torch.from_numpy(batch.shaped_rewards)
    if algorithm.truncated in ("bootstrap", "egae"):
        return episode_ends(
            rewards,
            values,
            torch.from_numpy(batch.lengths),
            torch.from_numpy(batch.truncated),
            algorithm.truncated,
            last_values=None if end_values is None else torch.from_numpy(end_values).mean(0),
        )
    return EpisodeEnds(
        rewards=rewards,
        bootstrap_values=torch.zeros_like(rewards),
        critic_trains=torch.ones(len(rewards), dtype=torch.bool),
    )


def scaled_by_entropy(
    batch: Batch, advantages: Tensor, proximal_logprobs: Tensor, counted: Tensor, memory: StepMemory
) -> tuple[Tensor, StepMemory]:
    """GEPO's scaling by the entropy of a group against the batches before; the first batch only starts the average."""
    lengths, group_ids = torch.from_numpy(batch.lengths), torch.from_numpy(batch.group_ids)
    entropies = group_entropy(proximal_logprobs, lengths, group_ids, counted)
    if memory.entropy is not None:
        advantages = gepo_entropy_scale(
            advantages,
            spread(entropies, lengths).to(advantages.dtype),
            memory.entropy,
            low_width=_GEPO_LOW_WIDTH,
            high_width=_GEPO_HIGH_WIDTH,
            low_factor=_GEPO_LOW_FACTOR,
            high_factor=_GEPO_HIGH_FACTOR,
        )
    return advantages, StepMemory(
        calibration=memory.calibration, entropy=track_entropy(memory.entropy, entropies, rate=_GEPO_RATE)
    )


def calibrated(
    batch: Batch, values: NDArray[np.float32], algorithm: AlgorithmSection, memory: StepMemory
) -> StepMemory:
    """The calibration errors with this batch, of tokens whose response the critic has not been trained on."""
    lengths = torch.from_numpy(batch.lengths)
    known = memory.calibration or initial_calibration(len(values), algorithm.calibration_bins)
    held_out = torch.repeat_interleave(~torch.from_numpy(batch.trained_on()), lengths, dim=1)
    return StepMemory(
        calibration=update_calibration(
            known,
            torch.from_numpy(values),
            spread(torch.from_numpy(batch.shaped_rewards), lengths),
            held_out,
            rate=algorithm.calibration_rate,
        ),
        entropy=memory.entropy,
    )
