"""One rank of a critic: values of given responses from the last prompt token on, and its training."""

import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyppo_async.algorithms.critics import value_loss
from asyppo_async.trainer.worker.messages import CriticForward, CriticForwardResult, CriticTrain, TrainResult
from asyppo_async.trainer.worker.model import Critic
from asyppo_async.trainer.worker.packing import MicroBatch, lay_out, micro_batches
from asyppo_async.trainer.worker.steps import Stepper, TokenSums, sequences_with


class CriticLearner:
    def __init__(self, critic: Critic, stepper: Stepper, *, micro_batch_tokens: int) -> None:
        self._critic = critic
        self._stepper = stepper
        self._micro_batch_tokens = micro_batch_tokens
        self._device = next(critic.module.parameters()).device

    @torch.inference_mode()
    def forward(self, request: CriticForward) -> CriticForwardResult:
        started_s = time.perf_counter()
        sequences = request.sequences
        values = np.empty(sequences.num_response_tokens, dtype=np.float32)
        chosen = np.arange(sequences.num_sequences)
        for batch in micro_batches(sequences, lay_out(sequences), chosen, self._micro_batch_tokens):
            predicted = self._critic.values(self._tensor(batch.input_ids), self._tensor(batch.states))
            values[batch.tokens] = predicted.float().cpu().numpy()
        return CriticForwardResult(values=values, compute_s=time.perf_counter() - started_s)

    def train(self, request: CriticTrain) -> TrainResult:
        started_s = time.perf_counter()
        layout = lay_out(request.sequences)

        def loss_of(batch: MicroBatch, step: int) -> tuple[Tensor, TokenSums]:
            return self._loss(request, batch, float(request.mini_batches.denominators[step]))

        steps = self._stepper.run(
            request.sequences,
            layout,
            request.mini_batches,
            has_weight=sequences_with(request.weights, layout),
            loss_of=loss_of,
        )
        return TrainResult(steps=steps, compute_s=time.perf_counter() - started_s)

    def _loss(self, request: CriticTrain, batch: MicroBatch, denominator: float) -> tuple[Tensor, TokenSums]:
        """sum(weights * 1/2 (V - G)^2) / D over the micro-batch; tokens without weight may hold NaN."""
        kept = request.weights[batch.tokens] != 0
        tokens = batch.tokens[kept]
        values = self._critic.values(self._tensor(batch.input_ids), self._tensor(batch.states[kept]))
        old_values = self._tensor(request.old_values[tokens]).to(values.dtype)
        terms = value_loss(
            values,
            self._tensor(request.targets[tokens]).to(values.dtype),
            clip=request.value_clip,
            old_values=old_values,
            half=request.half,
        )
        loss = (self._tensor(request.weights[tokens]).to(values.dtype) * terms).sum() / denominator
        clipped = 0
        if request.value_clip is not None:
            clipped = int(((values.detach() - old_values).abs() > request.value_clip).sum())
        return loss, TokenSums(loss=float(loss.detach()), num_tokens=len(tokens), num_clipped_low=clipped)

    def _tensor(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self._device)
