"""One rank of the actor: log-probs of given responses, and the training of the policy.

Legend: `N` response tokens of a micro-batch.
"""

import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyppo_async.algorithms.logprobs import KeptSet, TokenDistribution
from asyppo_async.algorithms.losses import TokenLoss, policy_log_ratio, policy_ratio
from asyppo_async.algorithms.packed import neutralise
from asyppo_async.algorithms.policy_losses import LossInputs, policy_loss
from asyppo_async.algorithms.ratio_counts import count_log_ratios
from asyppo_async.algorithms.regularisers import kl_penalty
from asyppo_async.errors import WorkerError
from asyppo_async.trainer.worker.experts import Experts
from asyppo_async.trainer.worker.messages import ActorForward, ActorForwardResult, ActorTrain, TrainResult
from asyppo_async.trainer.worker.model import Policy, Scoring
from asyppo_async.trainer.worker.packing import MicroBatch, lay_out
from asyppo_async.trainer.worker.reference import Frozen
from asyppo_async.trainer.worker.steps import Stepper, TokenSums, sequences_with

_HEAD_CHUNK_ELEMENTS = 2**25
"""Tokens times vocabulary of one chunk of logits: 128 MiB in float32."""


class Actor:
    def __init__(
        self,
        policy: Policy,
        stepper: Stepper,
        *,
        reference: Frozen | None = None,
    ) -> None:
        self._policy = policy
        self._stepper = stepper
        self._experts = Experts(policy)
        self._reference = reference
        self._device = policy.head_weight.device
        self._chunk_tokens = max(1, _HEAD_CHUNK_ELEMENTS // policy.vocab_size)

    @torch.no_grad()
    def forward(self, request: ActorForward) -> ActorForwardResult:
        started_s = time.perf_counter()
        sequences = request.sequences
        logprobs = np.empty(sequences.num_response_tokens, dtype=np.float32)
        entropies = np.empty_like(logprobs)
        reference_logprobs = np.empty_like(logprobs) if request.with_reference else None
        chosen = np.arange(sequences.num_sequences)
        batches = list(self._stepper.cutting.micro_batches(sequences, lay_out(sequences), chosen))
        num_idle = self._stepper.num_idle([len(batches)])[0]
        if request.with_reference and self._reference is not None and self._reference.runs_in_engine:
            num_idle *= 2
        for _ in range(num_idle):
            self._idle_loss(with_entropy=False)
        for batch in batches:
            everything = np.ones(len(batch.tokens), dtype=np.bool_)
            with self._experts.replaying(request, batch):
                distribution = self._distribution(batch, everything, request)
            outside = ~distribution.inside
            logprobs[batch.tokens] = (
                distribution.logprobs.masked_fill(outside, -torch.inf).float().cpu().numpy()
            )
            entropies[batch.tokens] = distribution.entropies.float().cpu().numpy()
            if reference_logprobs is not None:
                reference_logprobs[batch.tokens] = self._of_reference(batch, request)
        return ActorForwardResult(
            logprobs=logprobs,
            entropies=entropies,
            compute_s=time.perf_counter() - started_s,
            reference_logprobs=reference_logprobs,
        )

    def train(self, request: ActorTrain) -> TrainResult:
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

        return self._stepper.run(
            request.sequences,
            layout,
            request.mini_batches,
            has_weight=has_weight,
            loss_of=loss_of,
            idle_loss=lambda: self._idle_loss(with_entropy=request.entropy_coefficient != 0),
            within=lambda batch: self._experts.replaying(request, batch),
        )

    def _distribution(
        self, batch: MicroBatch, kept: NDArray[np.bool_], request: ActorForward | ActorTrain
    ) -> TokenDistribution:
        """Of the kept ones of the micro-batch's response tokens."""
        return self._policy.distribution(
            self._tensor(batch.input_ids),
            self._tensor(batch.states[kept]),
            self._tensor(batch.token_ids[kept]),
            Scoring(
                documents=batch.documents,
                temperature=request.temperature,
                chunk_tokens=self._chunk_tokens,
                kept_set=KeptSet(top_k=request.top_k, top_p=request.top_p),
            ),
        )

    def _idle_loss(self, *, with_entropy: bool) -> Tensor:
        """Of one token that counts for nothing: the gradient of every weight is exactly 0.

        It must use the same outputs as the loss of the peers: their backward is one series of collectives.
        """
        position = torch.zeros(1, dtype=torch.int64, device=self._device)
        idle = self._policy.distribution(
            position[None], position, position, Scoring(temperature=1.0, chunk_tokens=1)
        )
        return (idle.logprobs + idle.entropies if with_entropy else idle.logprobs).sum() * 0

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
            loss = loss + request.kl_coefficient * self._divergence(
                request, tokens, logprobs, policy_weights
            ) / (denominator)
        if request.positives is not None and request.positives.denominators[step] > 0:
            right = self._tensor(request.positives.tokens[tokens]) & distribution.inside
            likelihood = neutralise(logprobs, right).sum() / float(request.positives.denominators[step])
            loss = loss - request.positives.coefficient * likelihood

        moved = log_ratio.detach()[acted]
        ratio = policy_ratio(moved)
        explored = entropy_weights != 0
        masked, masked_clipped = self._clip_of_masked(
            request, batch, kept, logprobs.detach(), distribution.inside
        )
        return loss, TokenSums(
            loss=float(loss.detach()),
            num_tokens=int(acted.sum()),
            entropy=float(entropies.detach()[explored].sum()),
            num_entropy_tokens=int(explored.sum()),
            num_clipped_low=int((terms.clipped_low & acted).sum()),
            num_clipped_high=int((terms.clipped_high & acted).sum()),
            ratio=float(ratio.sum()),
            kl=float((ratio - 1 - moved).sum()),
            log_ratio=float(moved.sum()),
            num_masked=masked,
            num_masked_clipped=masked_clipped,
            ratio_max=float(ratio.max()) if len(ratio) else float("-inf"),
            ratio_counts=count_log_ratios(moved),
        )

    @torch.no_grad()
    def _clip_of_masked(
        self,
        request: ActorTrain,
        batch: MicroBatch,
        kept: NDArray[np.bool_],
        logprobs: Tensor,
        inside: Tensor,
    ) -> tuple[int, int]:
        """Masked tokens among the kept ones, and on how many of them the clip would act if they were not masked."""
        if request.masked is None:
            return 0, 0
        masked = self._tensor(request.masked[batch.tokens[kept]]) & inside
        terms, _ = self._policy_terms(request, batch, kept, logprobs, masked)
        return int(masked.sum()), int(((terms.clipped_low | terms.clipped_high) & masked).sum())

    def _divergence(
        self, request: ActorTrain, tokens: NDArray[np.int64], logprobs: Tensor, weights: Tensor
    ) -> Tensor:
        """sum(policy_weights * KL) to the frozen reference, or to what the loss's ratio is over."""
        frozen = request.reference_logprobs
        held_to = self._tensor((request.proximal_logprobs if frozen is None else frozen)[tokens])
        known = (weights != 0) & held_to.isfinite()
        divergence = kl_penalty(
            neutralise(logprobs, known), neutralise(held_to.to(logprobs.dtype), known), request.kl_estimator
        )
        return (weights * divergence).sum()

    def _of_reference(self, batch: MicroBatch, request: ActorForward) -> NDArray[np.float32]:
        if self._reference is None:
            raise WorkerError("log-probs of the frozen reference were asked for, and the actor has none")
        return self._reference.logprobs(batch, request, chunk_tokens=self._chunk_tokens)

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
