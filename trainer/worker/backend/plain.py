"""Training with plain torch: every rank holds the whole model, gradients are summed over the group's world."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from asyppo_async.trainer.worker.away import Away
from asyppo_async.trainer.worker.backend.average import Average
from asyppo_async.trainer.worker.backend.fragments import whole_fragments
from asyppo_async.trainer.worker.backend.optimizer import adamw, begin_moments, moment_steps, set_rate
from asyppo_async.trainer.worker.backend.protocol import StepOutcome
from asyppo_async.trainer.worker.backend.state_files import (
    AVERAGE,
    Fragment,
    Progress,
    open_state,
    write_state,
)
from asyppo_async.trainer.worker.learning_rate import LearningRate
from asyppo_async.trainer.worker.lora import NO_ADAPTERS, Adapters
from asyppo_async.trainer.worker.messages import PartNorms
from asyppo_async.trainer.worker.world import World


class PlainBackend:
    """AdamW on float32 masters where the weights are of lower precision, on the weights themselves otherwise.

    What of `module` lies outside `root` is its head.
    """

    collective = False

    def __init__(
        self,
        module: nn.Module,
        root: nn.Module,
        *,
        world: World,
        learning_rate: LearningRate,
        weight_decay: float,
        max_grad_norm: float,
        ema_decay: float = 0.0,
        adapters: Adapters = NO_ADAPTERS,
    ) -> None:
        self._module = module
        self._adapters = adapters
        self._world = world
        self._learning_rate = learning_rate
        self._max_grad_norm = max_grad_norm
        self._num_steps = 0
        trained = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
        self._names, self._weights = list(trained), list(trained.values())
        self._masters = [_master_of(weight) for weight in self._weights]
        inside = set(map(id, root.parameters()))
        self._is_head = torch.tensor([id(weight) not in inside for weight in self._weights])
        named = zip(self._names, self._masters, strict=True)
        self._optimizer = adamw(named, learning_rate, weight_decay)
        self._average = Average(self._masters, ema_decay)
        self._away = Away()

    @property
    def device(self) -> torch.device:
        return next(self._module.parameters()).device

    @property
    def learning_rate(self) -> float:
        return self._learning_rate.after(self._num_steps)

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
        norms = torch.stack(torch._foreach_norm(gradients))
        norm = float(torch.linalg.vector_norm(norms))
        learning_rate = self.learning_rate
        applied = math.isfinite(norm)
        if applied:
            if norm > self._max_grad_norm:
                torch._foreach_mul_(gradients, self._max_grad_norm / norm)
            set_rate(self._optimizer, learning_rate)
            self._optimizer.step()
            self._num_steps += 1
            self._copy_to_weights()
        self.discard()
        return StepOutcome(
            grad_norm=norm, learning_rate=learning_rate, applied=applied, parts=self._parts(norms)
        )

    def forget_moments(self) -> None:
        self._optimizer.state.clear()

    def discard(self) -> None:
        for weight, master in zip(self._weights, self._masters, strict=True):
            weight.grad = master.grad = None

    def full_tensors(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        weights = dict(self._module.named_parameters())
        for name in names:
            yield name, weights[name].detach()

    def save(self, folder: Path) -> None:
        if self._world.rank != 0:
            return
        tensors = None
        if self._adapters.layers:
            names = self._adapters.original_names(name for name, _ in self._module.named_parameters())
            tensors = dict(self._adapters.merged(self.full_tensors, names, here=True))
        self._module.save_pretrained(folder, state_dict=tensors)  # type: ignore[operator]

    def _parts(self, gradient_norms: Tensor) -> PartNorms | None:
        head = self._is_head
        if not bool(head.any()):
            return None
        weight_norms = torch.stack(torch._foreach_norm([master.detach() for master in self._masters]))
        return PartNorms(
            head_gradient=float(torch.linalg.vector_norm(gradient_norms[head])),
            backbone_gradient=float(torch.linalg.vector_norm(gradient_norms[~head])),
            head_weights=float(torch.linalg.vector_norm(weight_norms[head])),
            backbone_weights=float(torch.linalg.vector_norm(weight_norms[~head])),
        )

    def save_state(self, folder: Path) -> None:
        """Rank 0 alone writes: the others hold the same bits."""
        if self._world.rank == 0:
            progress = Progress(num_steps=self._num_steps, moment_steps=moment_steps(self._optimizer))
            write_state(folder, 0, 1, self._fragments(), progress)

    @torch.no_grad()
    def load_state(self, folder: Path, *, average: bool = False) -> None:
        masters = self._named_masters()
        with open_state(folder, average=average) as files:
            files.check({name: tuple(master.shape) for name, master in masters.items()})
            self._num_steps = files.progress.num_steps
            self._optimizer.state.clear()
            if files.has_moments:
                begin_moments(self._optimizer, masters.values(), files.progress.moment_steps)
            files.fill(self._fragments())
            if AVERAGE not in files.kinds:
                self._average.start_anew()
        self._copy_to_weights()

    @torch.no_grad()
    def update_average(self) -> None:
        self._average.update()

    def averages(self) -> Iterator[tuple[str, Tensor]]:
        for fragment in self._fragments():
            yield fragment.name, fragment.tensors[AVERAGE].view(fragment.shape)

    def to_host(self, *, weights: bool) -> None:
        moments = [value for state in self._optimizer.state.values() for value in state.values()]
        masters = [
            master
            for master, weight in zip(self._masters, self._weights, strict=True)
            if master is not weight
        ]
        self._away.send([*moments, *masters, *self._average.values])
        if weights:
            self._away.send([*self._module.parameters(), *self._module.buffers()])

    def to_device(self) -> None:
        self._away.bring_back()

    def _fragments(self) -> Iterator[Fragment]:
        return whole_fragments(self._named_masters(), self._optimizer, self._average)

    def _named_masters(self) -> dict[str, Tensor]:
        return dict(zip(self._names, self._masters, strict=True))

    def _copy_to_weights(self) -> None:
        for weight, master in zip(self._weights, self._masters, strict=True):
            if master is not weight:
                weight.copy_(master)

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
