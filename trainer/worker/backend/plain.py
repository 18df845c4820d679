"""Training with plain torch: every rank holds the whole model, gradients are summed over the group's world."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from asyppo_async.trainer.worker.backend.protocol import StepOutcome
from asyppo_async.trainer.worker.world import World


class PlainBackend:
    """AdamW on float32 masters where the weights are of lower precision, on the weights themselves otherwise.

    Weight decay acts on matrices only, not on norms and biases.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        world: World,
        learning_rate: float,
        weight_decay: float,
        warmup_steps: int,
        max_grad_norm: float,
    ) -> None:
        self._module = module
        self._world = world
        self._base_learning_rate = learning_rate
        self._warmup_steps = warmup_steps
        self._max_grad_norm = max_grad_norm
        self._num_steps = 0
        self._names = [name for name, _ in module.named_parameters()]
        self._weights = [parameter for _, parameter in module.named_parameters()]
        self._masters = [_master_of(weight) for weight in self._weights]
        decayed = [master for master in self._masters if master.dim() >= 2]
        others = [master for master in self._masters if master.dim() < 2]
        self._optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=learning_rate,
            fused=True,
        )

    @property
    def learning_rate(self) -> float:
        """Rises linearly over the first `warmup_steps` steps."""
        if self._num_steps >= self._warmup_steps:
            return self._base_learning_rate
        return self._base_learning_rate * (self._num_steps + 1) / self._warmup_steps

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        for weight, master in zip(self._weights, self._masters, strict=True):
            # bfloat16 loses small micro-batches in the sum, so the sum is the master's.
            if master is not weight and weight.grad is not None:
                gradient = weight.grad.to(master.dtype)
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                weight.grad = None

    @torch.no_grad()
    def step(self) -> StepOutcome:
        gradients = self._summed_gradients()
        norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
        learning_rate = self.learning_rate
        applied = math.isfinite(norm)
        if applied:
            if norm > self._max_grad_norm:
                torch._foreach_mul_(gradients, self._max_grad_norm / norm)
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
            self._num_steps += 1
            for weight, master in zip(self._weights, self._masters, strict=True):
                if master is not weight:
                    weight.copy_(master)
        self.discard()
        return StepOutcome(grad_norm=norm, learning_rate=learning_rate, applied=applied)

    def forget_moments(self) -> None:
        self._optimizer.state.clear()

    def discard(self) -> None:
        for weight, master in zip(self._weights, self._masters, strict=True):
            weight.grad = master.grad = None

    def full_tensors(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        weights = dict(zip(self._names, self._weights, strict=True))
        for name in names:
            yield name, weights[name].detach()

    def save(self, folder: Path) -> None:
        if self._world.rank == 0:
            self._module.save_pretrained(folder)  # type: ignore[operator]

    def _summed_gradients(self) -> list[Tensor]:
        """The gradient of every parameter over all ranks, in place; zeros where nothing reached it."""
        for master in self._masters:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        gradients = [master.grad for master in self._masters if master.grad is not None]
        self._world.sum_in_place(gradients)
        return gradients


def _master_of(weight: nn.Parameter) -> Tensor:
    if weight.dtype in (torch.float32, torch.float64):
        return weight
    return weight.detach().to(torch.float32).requires_grad_()
