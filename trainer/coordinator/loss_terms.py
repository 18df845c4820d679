"""What the actor is told beside the weights: which loss, over which reference, and the likelihood of right answers.

Legend: B responses, N = sum of T response tokens.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyppo_async.algorithms.composition import check_ratio_use
from asyppo_async.algorithms.mismatch import MismatchCorrection
from asyppo_async.algorithms.packed import neutralise, segment_sum, suffix_sum
from asyppo_async.algorithms.policy_losses import PolicyLoss
from asyppo_async.algorithms.sequence_losses import group_expectation_reference
from asyppo_async.algorithms.token_age import approximate_proximal
from asyppo_async.algorithms.token_classes import TokenMasks
from asyppo_async.config.algorithm import AlgorithmSection
from asyppo_async.config.checks import OVER_BEHAVIOUR
from asyppo_async.trainer.coordinator.batch import Batch
from asyppo_async.trainer.coordinator.correction import TOKEN_RULES
from asyppo_async.trainer.coordinator.mini_batches import counts_of_steps
from asyppo_async.trainer.worker.messages import MiniBatches, PositiveLikelihood
from asyppo_async.types import Float32Array


def loss_of(algorithm: AlgorithmSection) -> PolicyLoss:
    """The loss that the section describes."""
    return PolicyLoss(
        kind=algorithm.loss,
        dual_clip=algorithm.dual_clip,
        bounds=algorithm.cispo_bounds,
        unified_mask=algorithm.cispo_unified_mask,
        level=algorithm.topr_level,
        kl_coefficient=algorithm.dppo_kl_coefficient,
        length_normalised=algorithm.gepo_length_normalised,
    )


def reference_of(
    batch: Batch,
    mismatch: MismatchCorrection,
    proximal_logprobs: Float32Array,
    algorithm: AlgorithmSection,
) -> Float32Array:
    """[N] log-probs that the ratio of the loss is over.

    Raises:
        ConfigError: The mismatch would be counted twice, which a configuration that was checked does not ask for.
    """
    if algorithm.loss == "gepo_expectation":
        return _group_expectation(batch, mismatch, length_normalised=algorithm.gepo_length_normalised)
    if algorithm.loss_reference == "behaviour" or algorithm.loss in OVER_BEHAVIOUR:
        check_ratio_use("behaviour", TOKEN_RULES[algorithm.mismatch])
        return batch.behaviour_logprobs
    return proximal_logprobs


def proximal_by_age(batch: Batch, logprobs: Float32Array) -> Float32Array:
    """[N] A-3PO's proximal log-probs from the actor's at the start of the step."""
    between: NDArray[np.float32] = approximate_proximal(
        torch.from_numpy(np.require(batch.behaviour_logprobs, requirements="W")),
        torch.from_numpy(np.require(logprobs, requirements="W")),
        torch.from_numpy(np.require(batch.versions, requirements="W")),
        batch.step,
    ).numpy()
    return between


def positives_of(
    batch: Batch, masks: TokenMasks, mini_batches: MiniBatches, coefficient: float
) -> PositiveLikelihood | None:
    """The tokens of right responses that train the policy, and how many each optimizer step has."""
    if coefficient == 0:
        return None
    tokens: NDArray[np.bool_] = masks.policy.numpy() & np.repeat(batch.correct, batch.lengths)
    counts = segment_sum(torch.from_numpy(tokens), torch.from_numpy(batch.lengths)).to(torch.int64).numpy()
    return PositiveLikelihood(
        tokens=tokens, denominators=counts_of_steps(mini_batches, counts), coefficient=coefficient
    )


def reference_for_loss(
    reference_logprobs: Float32Array | None, algorithm: AlgorithmSection
) -> Float32Array | None:
    """[N] that the loss's KL is over; None where that KL is a cost in the advantages, or none is asked for."""
    return None if algorithm.kl_estimator == "k1" else reference_logprobs


def divergence_to_go(
    proximal_logprobs: Float32Array, reference_logprobs: Float32Array, lengths: Tensor
) -> Tensor:
    """[N] sum over the rest of the response of k1 = log pi_old - log pi_ref; a token without both counts 0.

    As a cost of every token from here on its score-function gradient is that of the KL of whole responses.
    """
    difference = torch.from_numpy(proximal_logprobs.astype(np.float64) - reference_logprobs)
    return suffix_sum(neutralise(difference, difference.isfinite()), lengths).float()


def _group_expectation(
    batch: Batch, mismatch: MismatchCorrection, *, length_normalised: bool
) -> Float32Array:
    """[N] log E_q[q] of the group, spread so that the sum (or mean) over a response's tokens gives it back."""
    reference: Float32Array = (
        group_expectation_reference(
            torch.from_numpy(np.require(batch.behaviour_logprobs, requirements="W")),
            torch.from_numpy(batch.lengths),
            torch.from_numpy(batch.group_ids),
            mismatch.measured,
            length_normalised=length_normalised,
        )
        .float()
        .numpy()
    )
    return reference
