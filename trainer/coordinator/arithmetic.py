"""The per-token arithmetic of a step, on the whole batch, in one process (design: "why the coordinator does it").

Pure: numpy in, numpy out, the functions of `asyppo_async.algorithms` in between. Runs in a thread.
Legend: B responses, N = sum of T response tokens, M critics, S optimizer steps.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from asyppo_async.algorithms.advantages import value_targets
from asyppo_async.algorithms.aggregation import token_weights
from asyppo_async.algorithms.composition import entropy_coefficients, policy_coefficients
from asyppo_async.algorithms.critics import ValueStdMasks, value_std
from asyppo_async.algorithms.mismatch import MismatchCorrection
from asyppo_async.algorithms.packed import spread
from asyppo_async.algorithms.token_classes import TokenMasks, classify_tokens, token_masks
from asyppo_async.config.algorithm import AlgorithmSection
from asyppo_async.config.critic import CriticSection
from asyppo_async.config.sections import ActorSection, SamplingSection
from asyppo_async.trainer.coordinator.batch import Batch, select_sequences, tokens_of
from asyppo_async.trainer.coordinator.correction import by_advantage, mismatch_of
from asyppo_async.trainer.coordinator.estimators import (
    Baselines,
    advantages_of,
    calibrated,
    scaled_by_entropy,
)
from asyppo_async.trainer.coordinator.loss_terms import (
    divergence_to_go,
    loss_of,
    positives_of,
    reference_for_loss,
    reference_of,
)
from asyppo_async.trainer.coordinator.memory import StepMemory
from asyppo_async.trainer.coordinator.mini_batches import plan_mini_batches
from asyppo_async.trainer.coordinator.token_choice import choose_tokens
from asyppo_async.trainer.worker.messages import ActorTrain, CriticTrain
from asyppo_async.types import BoolArray, Float32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDecisions:
    """What was decided about every token of a batch, frozen for all epochs and mini-batches."""

    advantages: torch.Tensor
    """[N]"""
    value_std: torch.Tensor
    """[N]; 0 without critics."""
    std_masks: ValueStdMasks
    mismatch: MismatchCorrection
    classes: torch.Tensor
    """[N] uint8 of `TokenClass`."""
    masks: TokenMasks
    policy_weights: torch.Tensor
    """[N]"""
    entropy_weights: torch.Tensor
    """[N]"""
    memory: StepMemory
    """For the step after this one."""

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
    baselines: Baselines | None = None,
    filtered: BoolArray | None = None,
    entropies: Float32Array | None = None,
    seed: int = 0,
    memory: StepMemory | None = None,
) -> TokenDecisions:
    """Advantages, masks and weights of a batch (`algorithms.md` 1.3, AsyPPO Algorithm 1 steps 3 to 5).

    Args:
        batch: The batch.
        values: [M, N] of the critics.
        proximal_logprobs: [N] of the actor at the start of the step.
        stale: [N] tokens beyond the bound.
        algorithm: The section of that name.
        baselines: What else than `values` the estimator reads.
        filtered: [B] responses of groups that teach nothing; None: none is.
        entropies: [N] of the actor at the start of the step, for selections by entropy.
        seed: Of the run, for random selections.
        memory: Of the steps before.
    """
    lengths = torch.from_numpy(batch.lengths)
    out = torch.zeros(len(lengths), dtype=torch.bool) if filtered is None else torch.from_numpy(filtered)
    mismatch, advantages, known = _advantages(
        batch,
        baselines or Baselines(values=values),
        proximal_logprobs,
        counted=~spread(out, lengths),
        algorithm=algorithm,
        memory=memory or StepMemory(),
    )
    classes = classify_tokens(
        lengths,
        stale=torch.from_numpy(stale),
        filtered_responses=out,
        keep_sequences=mismatch.keep_sequences,
        keep_tokens=mismatch.keep_tokens,
    )
    masks = _masks(classes, algorithm)
    std = _value_std(values, algorithm)
    std_masks = choose_tokens(batch, std, masks, entropies, algorithm=algorithm, seed=seed)
    shares = token_weights(algorithm.aggregation, lengths, masks.denominator)
    weights = shares * mismatch.weights.to(shares.dtype)
    return TokenDecisions(
        advantages=advantages,
        value_std=std,
        std_masks=std_masks,
        mismatch=mismatch,
        classes=classes,
        masks=masks,
        policy_weights=policy_coefficients(masks, weights, std_masks.advantage_keep),
        entropy_weights=shares.where(entropy_coefficients(masks, std_masks.entropy_keep), 0.0),
        memory=known,
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
    reference_logprobs: Float32Array | None = None,
) -> ActorTrain:
    """What the actor group is told: ready weights per token and global denominators."""
    masks, loss = decisions.masks, loss_of(algorithm)
    reference = reference_of(batch, decisions.mismatch, proximal_logprobs, algorithm)
    mini_batches = plan_mini_batches(
        batch.lengths,
        num_per_epoch=actor.mini_batches,
        epochs=actor.epochs,
        generator=np.random.default_rng((seed, batch.step, 0)),
        mode=algorithm.aggregation,
        counted=masks.denominator,
        responses_counted=masks.responses,
        max_length=sampling.max_tokens,
    )
    return ActorTrain(
        sequences=batch.sequences,
        proximal_logprobs=np.where(np.isfinite(reference), reference, np.float32(0)),
        advantages=_float32(decisions.advantages),
        policy_weights=_float32(decisions.policy_weights),
        entropy_weights=_float32(decisions.entropy_weights),
        mini_batches=mini_batches,
        temperature=sampling.temperature,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        entropy_coefficient=algorithm.entropy_coefficient,
        loss=loss,
        counted=(masks.denominator & decisions.mismatch.measured).numpy()
        if loss.of_whole_responses
        else None,
        masked=(masks.policy & ~decisions.std_masks.advantage_keep).numpy()
        if algorithm.advantage_mask_share > 0
        else None,
        # k1 is in the advantages already.
        kl_coefficient=0.0 if algorithm.kl_estimator == "k1" else algorithm.kl_coefficient,
        kl_estimator=algorithm.kl_estimator,
        reference_logprobs=reference_for_loss(reference_logprobs, algorithm),
        routed_experts=batch.routed_experts,
        positives=positives_of(batch, masks, mini_batches, algorithm.positive_nll_coefficient),
        reset_optimizer=actor.reset_optimizer,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
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
    if algorithm.truncated in ("bootstrap", "egae"):  # the return of a response that was cut is not known
        trained = trained & ~np.repeat(batch.truncated, batch.lengths)
    requests = []
    for index, rows in enumerate(batch.critic_shares):
        lengths = torch.from_numpy(batch.lengths[rows])
        own_values = torch.from_numpy(tokens_of(values[index], batch.lengths, rows))
        counted = torch.from_numpy(tokens_of(trained, batch.lengths, rows))
        targets = value_targets(
            torch.from_numpy(batch.shaped_rewards[rows]), own_values, lengths, algorithm.lambda_critic
        )
        requests.append(
            CriticTrain(
                sequences=select_sequences(batch.sequences, rows),
                targets=_float32(targets),
                weights=_float32(token_weights("token-mean", lengths, counted)),
                old_values=_float32(own_values),
                mini_batches=plan_mini_batches(
                    batch.lengths[rows],
                    num_per_epoch=critic.mini_batches,
                    epochs=critic.epochs,
                    generator=np.random.default_rng((seed, batch.step, 1 + index)),
                    mode="token-mean",
                    counted=counted,
                ),
                value_clip=critic.value_clip,
                half=critic.half_loss,
            )
        )
    return requests


def _masks(classes: torch.Tensor, algorithm: AlgorithmSection) -> TokenMasks:
    return token_masks(
        classes, critic_trains_on=algorithm.critic_trains_on, renormalise=algorithm.renormalise
    )


def _value_std(values: NDArray[np.float32], algorithm: AlgorithmSection) -> torch.Tensor:
    """[N] of [M, N]; 0 without critics."""
    if not len(values):
        return torch.zeros(values.shape[1])
    return value_std(torch.from_numpy(values), sample=algorithm.value_std_sample)


def _advantages(
    batch: Batch,
    baselines: Baselines,
    proximal_logprobs: Float32Array,
    *,
    counted: torch.Tensor,
    algorithm: AlgorithmSection,
    memory: StepMemory,
) -> tuple[MismatchCorrection, torch.Tensor, StepMemory]:
    """Correction, [N] advantages, and what is remembered; what looks at both is applied to both."""
    mismatch = mismatch_of(batch, proximal_logprobs, algorithm)
    advantages = advantages_of(batch, baselines, algorithm, counted=counted, memory=memory)
    reference = baselines.reference_logprobs
    if reference is not None and algorithm.kl_estimator == "k1":
        cost = divergence_to_go(proximal_logprobs, reference, torch.from_numpy(batch.lengths))
        advantages = advantages - algorithm.kl_coefficient * cost
    if algorithm.group_entropy_scaling:
        proximal = torch.from_numpy(np.require(proximal_logprobs, requirements="W"))
        advantages, memory = scaled_by_entropy(batch, advantages, proximal, mismatch.measured, memory)
    if algorithm.value_aggregation == "confidence":
        memory = calibrated(batch, baselines.values, algorithm, memory)
    return by_advantage(batch, mismatch, advantages, algorithm), advantages, memory


def _float32(tensor: torch.Tensor) -> Float32Array:
    return cast(Float32Array, tensor.to(torch.float32).numpy())
