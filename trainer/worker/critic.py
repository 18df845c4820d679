"""One rank of a critic: values of given responses from the last prompt token on, and its training."""

import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyppo_async.algorithms.critics import value_loss
from asyppo_async.trainer.worker.critic_model import Critic
from asyppo_async.trainer.worker.messages import CriticForward, CriticForwardResult, CriticTrain, TrainResult
from asyppo_async.trainer.worker.packing import MicroBatch, lay_out
from asyppo_async.trainer.worker.steps import Stepper, TokenSums, sequences_with


class CriticLearner:
    def __init__(self, critic: Critic, stepper: Stepper) -> None:
        self._critic = critic
        self._stepper = stepper
        self._device = next(critic.module.parameters()).device

    @torch.no_grad()
    def forward(self, request: CriticForward) -> CriticForwardResult:
        started_s = time.perf_counter()
        sequences = request.sequences
        values = np.empty(sequences.num_response_tokens, dtype=np.float32)
        chosen = np.arange(sequences.num_sequences)
        batches = list(self._stepper.cutting.micro_batches(sequences, lay_out(sequences), chosen))
        for _ in range(self._stepper.num_idle([len(batches)])[0]):
            self._idle_loss()
        for batch in batches:
            predicted = self._values(batch, batch.states)
            values[batch.tokens] = predicted.float().cpu().numpy()
        return CriticForwardResult(values=values, compute_s=time.perf_counter() - started_s)

    def train(self, request: CriticTrain) -> TrainResult:
        layout = lay_out(request.sequences)

        def loss_of(batch: MicroBatch, step: int) -> tuple[Tensor, TokenSums]:
            return self._loss(request, batch, float(request.mini_batches.denominators[step]))

        return self._stepper.run(
            request.sequences,
            layout,
            request.mini_batches,
            has_weight=sequences_with(request.weights, layout),
            loss_of=loss_of,
            idle_loss=self._idle_loss,
        )

    def _loss(self, request: CriticTrain, batch: MicroBatch, denominator: float) -> tuple[Tensor, TokenSums]:
        """sum(weights * 1/2 (V - G)^2) / D over the micro-batch; tokens without weight may hold NaN."""
        kept = request.weights[batch.tokens] != 0
        tokens = batch.tokens[kept]
        values = self._values(batch, batch.states[kept])
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

    def _values(self, batch: MicroBatch, states: NDArray[np.int64]) -> Tensor:
        return self._critic.values(self._tensor(batch.input_ids), self._tensor(states), batch.documents)

    def _idle_loss(self) -> Tensor:
        """Of one state that counts for nothing: the gradient of every weight is exactly 0."""
        position = torch.zeros(1, dtype=torch.int64, device=self._device)
        return self._critic.values(position[None], position).sum() * 0

    def _tensor(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self._device)
