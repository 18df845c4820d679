"""The per-token arithmetic of a step, on the whole batch, in one process (design: "why the coordinator does it").

Pure: numpy in, numpy out, the functions of `asyppo_async.algorithms` in between. Runs in a thread.
Legend: B responses, N = sum of T response tokens, M critics, S optimizer steps.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from asyppo_async.algorithms.advantages import gae, length_adaptive_lambda, value_targets, whiten
from asyppo_async.algorithms.aggregation import LossAggregation, denominator, token_weights
from asyppo_async.algorithms.critics import ValueStdMasks, ensemble_value, value_std, value_std_masks
from asyppo_async.algorithms.mismatch import MismatchCorrection, TokenRule, TokenRuleKind, correct_mismatch
from asyppo_async.algorithms.token_classes import TokenMasks, classify_tokens, token_masks
from asyppo_async.config.algorithm import AlgorithmSection
from asyppo_async.config.sections import ActorSection, CriticSection, SamplingSection
from asyppo_async.trainer.coordinator.batch import Batch, select_sequences, token_rows
from asyppo_async.trainer.worker.messages import ActorTrain, CriticTrain, MiniBatches
from asyppo_async.types import Float32Array

_RULES: dict[str, TokenRuleKind] = {
    "none": "none",
    "icepop": "icepop",
    "icepop_mask": "icepop_mask",
    "tis": "truncate",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDecisions:
    """What was decided about every token of a batch, frozen for all epochs and mini-batches."""

    advantages: torch.Tensor
    """[N]"""
    value_std: torch.Tensor
    """[N]"""
    std_masks: ValueStdMasks
    mismatch: MismatchCorrection
    classes: torch.Tensor
    """[N] uint8 of `TokenClass`."""
    masks: TokenMasks
    policy_weights: torch.Tensor
    """[N]"""
    entropy_weights: torch.Tensor
    """[N]"""

    @property
    def trainable(self) -> bool:
        """Whether any token has weight in the policy update."""
        return bool((self.policy_weights != 0).any())


def decide_tokens(
    batch: Batch,
    values: NDArray[np.float32],
    proximal_logprobs: Float32Array,
    *,
    stale: NDArray[np.bool_],
    algorithm: AlgorithmSection,
) -> TokenDecisions:
    """Advantages, masks and weights of a batch (`algorithms.md` 1.3, AsyPPO Algorithm 1 steps 3 to 5).

    Args:
        batch: The batch.
        values: [M, N] of the critics.
        proximal_logprobs: [N] of the actor at the start of the step.
        stale: [N] tokens beyond the bound.
        algorithm: The section of that name.
    """
    lengths = torch.from_numpy(batch.lengths)
    critics = torch.from_numpy(values)
    mismatch = _correct_mismatch(batch, proximal_logprobs, algorithm)
    classes = classify_tokens(
        lengths,
        stale=torch.from_numpy(stale),
        keep_sequences=mismatch.keep_sequences,
        keep_tokens=mismatch.keep_tokens,
    )
    masks = token_masks(
        classes, critic_trains_on=algorithm.critic_trains_on, renormalise=algorithm.renormalise
    )
    std = value_std(critics)
    std_masks = value_std_masks(
        std,
        advantage_share=algorithm.advantage_mask_share,
        entropy_share=algorithm.entropy_filter_share,
        valid=masks.ranking,
    )
    advantages = gae(
        torch.from_numpy(batch.rewards),
        ensemble_value(critics, algorithm.value_aggregation),
        lengths,
        _lambda(algorithm, lengths),
    )
    if algorithm.whiten_advantages:
        advantages = whiten(advantages, masks.advantage)
    shares = token_weights(algorithm.aggregation, lengths, masks.denominator)
    zero = torch.zeros_like(shares)
    return TokenDecisions(
        advantages=advantages,
        value_std=std,
        std_masks=std_masks,
        mismatch=mismatch,
        classes=classes,
        masks=masks,
        policy_weights=torch.where(
            masks.policy & std_masks.advantage_keep, shares * mismatch.weights.to(shares.dtype), zero
        ),
        entropy_weights=torch.where(masks.entropy & std_masks.entropy_keep, shares, zero),
    )


def actor_request(
    batch: Batch,
    decisions: TokenDecisions,
    proximal_logprobs: Float32Array,
    *,
    algorithm: AlgorithmSection,
    actor: ActorSection,
    sampling: SamplingSection,
    seed: int,
) -> ActorTrain:
    """What the actor group is told: ready weights per token and global denominators."""
    finite = np.isfinite(proximal_logprobs)
    return ActorTrain(
        sequences=batch.sequences,
        proximal_logprobs=np.where(finite, proximal_logprobs, np.float32(0)),
        advantages=_float32(decisions.advantages),
        policy_weights=_float32(decisions.policy_weights),
        entropy_weights=_float32(decisions.entropy_weights),
        mini_batches=_mini_batches(
            batch.lengths,
            num_per_epoch=actor.mini_batches,
            epochs=actor.epochs,
            generator=np.random.default_rng((seed, batch.step, 0)),
            mode=algorithm.aggregation,
            masks=decisions.masks,
            max_length=sampling.max_tokens,
        ),
        temperature=sampling.temperature,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        entropy_coefficient=algorithm.entropy_coefficient,
    )


def critic_requests(
    batch: Batch,
    *,
    values: NDArray[np.float32],
    trained: NDArray[np.bool_],
    algorithm: AlgorithmSection,
    critic: CriticSection,
    seed: int,
) -> list[CriticTrain]:
    """What each critic group is told: its own share of the responses, targets, token-mean denominators.

    Args:
        batch: The batch.
        values: [M, N] before the update; read where lambda_critic < 1 or the value loss is clipped.
        trained: [N] tokens that the value loss counts.
        algorithm: The section of that name.
        critic: The section of that name.
        seed: Of the run.
    """
    requests = []
    for index, rows in enumerate(batch.critic_shares):
        tokens = token_rows(batch.lengths, rows)
        lengths = torch.from_numpy(batch.lengths[rows])
        own_values = torch.from_numpy(values[index][tokens])
        counted = torch.from_numpy(trained[tokens])
        targets = value_targets(
            torch.from_numpy(batch.rewards[rows]), own_values, lengths, algorithm.lambda_critic
        )
        requests.append(
            CriticTrain(
                sequences=select_sequences(batch.sequences, rows),
                targets=_float32(targets),
                weights=_float32(token_weights("token-mean", lengths, counted)),
                old_values=_float32(own_values),
                mini_batches=_mini_batches(
                    batch.lengths[rows],
                    num_per_epoch=critic.mini_batches,
                    epochs=critic.epochs,
                    generator=np.random.default_rng((seed, batch.step, 1 + index)),
                    mode="token-mean",
                    masks=None,
                    counted=counted,
                ),
                value_clip=critic.value_clip,
            )
        )
    return requests


def _mini_batches(
    lengths: NDArray[np.int64],
    *,
    num_per_epoch: int,
    epochs: int,
    generator: np.random.Generator,
    mode: LossAggregation,
    masks: TokenMasks | None,
    counted: torch.Tensor | None = None,
    max_length: int | None = None,
) -> MiniBatches:
    """Deal the responses anew in every epoch; each optimizer step has its own global denominator."""
    in_denominator = masks.denominator if masks is not None else counted
    in_responses = masks.responses if masks is not None else counted
    parts: list[NDArray[np.int64]] = []
    denominators: list[float] = []
    for _ in range(epochs):
        for rows in np.array_split(generator.permutation(len(lengths)), num_per_epoch):
            tokens = torch.from_numpy(token_rows(lengths, rows))
            parts.append(rows)
            denominators.append(
                denominator(
                    mode,
                    torch.from_numpy(lengths[rows]),
                    None if in_denominator is None else in_denominator[tokens],
                    max_length=max_length,
                    responses_counted=None if in_responses is None else in_responses[tokens],
                )
            )
    return MiniBatches(
        sequence_indices=np.concatenate(parts).astype(np.int32),
        sizes=np.array([len(rows) for rows in parts], dtype=np.int32),
        denominators=np.array(denominators, dtype=np.float64),
    )


def _correct_mismatch(
    batch: Batch, proximal_logprobs: Float32Array, algorithm: AlgorithmSection
) -> MismatchCorrection:
    # What came over a wire is read-only, which torch refuses to look at without a warning.
    return correct_mismatch(
        torch.from_numpy(np.require(proximal_logprobs, requirements="W")),
        torch.from_numpy(np.require(batch.behaviour_logprobs, requirements="W")),
        torch.from_numpy(batch.lengths),
        rule=TokenRule(
            kind=_RULES[algorithm.mismatch], low=algorithm.mismatch_low, high=algorithm.mismatch_high
        ),
    )


def _lambda(algorithm: AlgorithmSection, lengths: torch.Tensor) -> float | torch.Tensor:
    if algorithm.lambda_actor is not None:
        return algorithm.lambda_actor
    return length_adaptive_lambda(lengths, algorithm.lambda_alpha)


def _float32(tensor: torch.Tensor) -> Float32Array:
    return cast(Float32Array, tensor.to(torch.float32).numpy())
