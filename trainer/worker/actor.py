"""One rank of the actor: log-probs of given responses, and the training of the policy.

Legend: `N` response tokens of a micro-batch.
"""

import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyppo_async.algorithms.logprobs import KeptSet, TokenDistribution, token_logprobs_and_entropy
from asyppo_async.algorithms.losses import TokenLoss, policy_log_ratio, policy_ratio
from asyppo_async.algorithms.packed import neutralise
from asyppo_async.algorithms.policy_losses import LossInputs, policy_loss
from asyppo_async.algorithms.regularisers import kl_penalty
from asyppo_async.trainer.worker.messages import ActorForward, ActorForwardResult, ActorTrain, TrainResult
from asyppo_async.trainer.worker.model import Policy
from asyppo_async.trainer.worker.packing import MicroBatch, lay_out, micro_batches
from asyppo_async.trainer.worker.steps import Stepper, TokenSums, sequences_with

_HEAD_CHUNK_ELEMENTS = 2**25
"""Tokens times vocabulary of one chunk of logits: 128 MiB in float32."""


class Actor:
    def __init__(self, policy: Policy, stepper: Stepper, *, micro_batch_tokens: int) -> None:
        self._policy = policy
        self._stepper = stepper
        self._micro_batch_tokens = micro_batch_tokens
        self._device = policy.head_weight.device

    @torch.inference_mode()
    def forward(self, request: ActorForward) -> ActorForwardResult:
        started_s = time.perf_counter()
        sequences = request.sequences
        logprobs = np.empty(sequences.num_response_tokens, dtype=np.float32)
        entropies = np.empty_like(logprobs)
        chosen = np.arange(sequences.num_sequences)
        for batch in micro_batches(sequences, lay_out(sequences), chosen, self._micro_batch_tokens):
            everything = np.ones(len(batch.tokens), dtype=np.bool_)
            distribution = self._distribution(batch, everything, request)
            outside = ~distribution.inside
            logprobs[batch.tokens] = (
                distribution.logprobs.masked_fill(outside, -torch.inf).float().cpu().numpy()
            )
            entropies[batch.tokens] = distribution.entropies.float().cpu().numpy()
        return ActorForwardResult(
            logprobs=logprobs, entropies=entropies, compute_s=time.perf_counter() - started_s
        )

    def train(self, request: ActorTrain) -> TrainResult:
        started_s = time.perf_counter()
        layout = lay_out(request.sequences)
        if request.reset_optimizer:
            self._stepper.forget_moments()
        has_weight = sequences_with(request.policy_weights, layout)
        if request.entropy_coefficient != 0:
            has_weight |= sequences_with(request.entropy_weights, layout)
        if request.positives is not None:
            has_weight |= sequences_with(request.positives.tokens, layout)

        def loss_of(batch: MicroBatch, step: int) -> tuple[Tensor, TokenSums]:
            return self._loss(request, batch, step)

        steps = self._stepper.run(
            request.sequences, layout, request.mini_batches, has_weight=has_weight, loss_of=loss_of
        )
        return TrainResult(steps=steps, compute_s=time.perf_counter() - started_s)

    def _distribution(
        self, batch: MicroBatch, kept: NDArray[np.bool_], request: ActorForward | ActorTrain
    ) -> TokenDistribution:
        """Of the kept ones of the micro-batch's response tokens."""
        hidden = self._policy.hidden_states(self._tensor(batch.input_ids)).flatten(0, 1)
        return token_logprobs_and_entropy(
            hidden[self._tensor(batch.states[kept])],
            self._policy.head_weight,
            self._tensor(batch.token_ids[kept]),
            temperature=request.temperature,
            chunk_tokens=max(1, _HEAD_CHUNK_ELEMENTS // self._policy.vocab_size),
            kept_set=KeptSet(top_k=request.top_k, top_p=request.top_p),
        )

    def _loss(self, request: ActorTrain, batch: MicroBatch, step: int) -> tuple[Tensor, TokenSums]:
        """sum(policy_weights * loss) / D - beta * sum(entropy_weights * H) / D over the micro-batch, and what is added.

        What has no weight is left out before the arithmetic, so it may hold NaN.
        """
        denominator = float(request.mini_batches.denominators[step])
        kept = _read_tokens(request, batch)
        tokens = batch.tokens[kept]
        distribution = self._distribution(batch, kept, request)
        logprobs, entropies = distribution.logprobs, distribution.entropies
        entropy_weights = self._tensor(request.entropy_weights[tokens]).to(logprobs.dtype)
        weights = self._tensor(request.policy_weights[tokens]).to(logprobs.dtype)
        policy_weights = neutralise(weights, distribution.inside)
        acted = policy_weights != 0

        terms, log_ratio = self._policy_terms(request, batch, kept, logprobs, acted)
        loss = (policy_weights * terms.terms).sum() / denominator
        if request.entropy_coefficient != 0:
            loss = loss - request.entropy_coefficient * (entropy_weights * entropies).sum() / denominator
        if request.kl_coefficient != 0:
            reference = neutralise(self._tensor(request.proximal_logprobs[tokens]).to(logprobs.dtype), acted)
            divergence = kl_penalty(neutralise(logprobs, acted), reference, request.kl_estimator)
            loss = loss + request.kl_coefficient * (policy_weights * divergence).sum() / denominator
        if request.positives is not None and request.positives.denominators[step] > 0:
            right = self._tensor(request.positives.tokens[tokens]) & distribution.inside
            likelihood = neutralise(logprobs, right).sum() / float(request.positives.denominators[step])
            loss = loss - request.positives.coefficient * likelihood

        detached = log_ratio.detach()
        ratio = policy_ratio(detached)[acted]
        explored = entropy_weights != 0
        return loss, TokenSums(
            loss=float(loss.detach()),
            num_tokens=int(acted.sum()),
            entropy=float(entropies.detach()[explored].sum()),
            num_entropy_tokens=int(explored.sum()),
            num_clipped_low=int((terms.clipped_low & acted).sum()),
            num_clipped_high=int((terms.clipped_high & acted).sum()),
            ratio=float(ratio.sum()),
            kl=float((ratio - 1 - detached[acted]).sum()),
            ratio_max=float(ratio.max()) if len(ratio) else float("-inf"),
        )

    def _policy_terms(
        self,
        request: ActorTrain,
        batch: MicroBatch,
        kept: NDArray[np.bool_],
        logprobs: Tensor,
        acted: Tensor,
    ) -> tuple[TokenLoss, Tensor]:
        """The loss's terms for the kept tokens, and their log ratios."""
        tokens = batch.tokens[kept]
        counted = acted
        if request.loss.of_whole_responses:
            counted = (
                torch.ones_like(acted) if request.counted is None else self._tensor(request.counted[tokens])
            )
        used = acted | counted
        reference = self._tensor(request.proximal_logprobs[tokens])
        log_ratio = policy_log_ratio(logprobs, reference, used)
        inputs = LossInputs(
            policy_logprobs=neutralise(logprobs, acted),
            reference_logprobs=neutralise(reference.to(logprobs.dtype), acted),
            log_ratio=log_ratio,
            advantages=neutralise(self._tensor(request.advantages[tokens]).to(logprobs.dtype), acted),
            lengths=self._tensor(batch.lengths_of(kept)),
            counted=counted,
        )
        terms = policy_loss(request.loss, inputs, clip_low=request.clip_low, clip_high=request.clip_high)
        return terms, log_ratio

    def _tensor(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _read_tokens(request: ActorTrain, batch: MicroBatch) -> NDArray[np.bool_]:
    """[N] which tokens of the micro-batch the loss reads; a loss of whole responses reads all that are counted."""
    kept = (request.policy_weights[batch.tokens] != 0) | (request.entropy_weights[batch.tokens] != 0)
    if request.positives is not None:
        kept |= request.positives.tokens[batch.tokens]
    if request.loss.of_whole_responses:
        kept |= True if request.counted is None else request.counted[batch.tokens]
    return np.asarray(kept)
