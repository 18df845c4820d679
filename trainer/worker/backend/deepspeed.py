"""Training with DeepSpeed: ZeRO 1, 2 and 3, with the caller's accumulation, in the world that the coordinator made.

DeepSpeed averages over ranks and counts micro-batches by itself; here the caller has divided by global denominators, so
the gradient is to be the plain sum. ZeRO 1 and 2 can sum (`gradient_allreduce_op`); ZeRO 3 only averages, so there the
loss is multiplied by the number of ranks first. `managed_gradient_accumulation: false` makes `step` the only boundary.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import deepspeed
import torch
from torch import Tensor, nn

from asyppo_async.config.learner import ZeroStage
from asyppo_async.trainer.worker.away import Away
from asyppo_async.trainer.worker.backend.average import Average, whole_averages
from asyppo_async.trainer.worker.backend.deepspeed_engine import forget_gradients, open_engine
from asyppo_async.trainer.worker.backend.deepspeed_moving import Mover
from asyppo_async.trainer.worker.backend.deepspeed_state import (
    copy_to_weights,
    flat_partitions,
    full_shape,
    partitioned_fragments,
)
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
from asyppo_async.trainer.worker.control import Offload
from asyppo_async.trainer.worker.learning_rate import LearningRate
from asyppo_async.trainer.worker.lora import NO_ADAPTERS, Adapters
from asyppo_async.trainer.worker.messages import PartNorms
from asyppo_async.trainer.worker.world import World

_PIECE_ELEMENTS = 2**25
"""Partitioned tensors are gathered in pieces of at most this many elements, or one tensor if it is larger."""


class DeepSpeedBackend:
    """Partitions `root` over the world; what of `module` lies outside it (a value head) is small and stays whole.

    bfloat16 weights have float32 masters and float32 sums of gradients. The whole rest keeps its own type; that is why
    it is not the engine's, which gives all parameters one type.
    """

    collective = True

    def __init__(
        self,
        module: nn.Module,
        root: nn.Module,
        *,
        world: World,
        learning_rate: LearningRate,
        weight_decay: float,
        max_grad_norm: float,
        zero_stage: ZeroStage,
        whole_below: int,
        offload: Offload,
        ema_decay: float = 0.0,
        adapters: Adapters = NO_ADAPTERS,
    ) -> None:
        self._module = module
        self._adapters = adapters
        self._world = world
        self._learning_rate = learning_rate
        self._max_grad_norm = max_grad_norm
        self._zero_stage = zero_stage
        self._loss_factor = world.size if zero_stage == 3 else 1
        self._num_steps = 0
        self._weights = dict(module.named_parameters())
        inside = set(map(id, root.parameters()))
        self._partitioned = {
            name: weight
            for name, weight in self._weights.items()
            if id(weight) in inside and weight.requires_grad
        }
        self._whole = {name: weight for name, weight in self._weights.items() if id(weight) not in inside}
        self._whole_norm = 0.0
        self._whole_optimizer = adamw(self._whole.items(), learning_rate, weight_decay)
        self._optimizer = adamw(self._partitioned.items(), learning_rate, weight_decay)
        self._optimizer.register_step_pre_hook(self._clip)
        self.engine = open_engine(root, self._optimizer, world, zero_stage, whole_below, offload)
        """Runs the forward of `root`."""
        self._average = Average([*self._masters(), *self._whole.values()], ema_decay)
        self._mover = Mover(self.engine, zero_stage, offload)
        self._away = Away()

    @property
    def device(self) -> torch.device:
        return next(self._module.parameters()).device

    @property
    def learning_rate(self) -> float:
        return self._learning_rate.after(self._num_steps)

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss * self._loss_factor, scale_wrt_gas=False)

    @torch.no_grad()
    def step(self) -> StepOutcome:
        learning_rate = self.learning_rate
        gradients = self._whole_gradients()
        self._whole_norm = _norm(gradients)
        if not math.isfinite(self._whole_norm):
            self.discard()
            return StepOutcome(
                grad_norm=self._whole_norm, learning_rate=learning_rate, applied=False, parts=None
            )
        for optimizer in (self._optimizer, self._whole_optimizer):
            set_rate(optimizer, learning_rate)
        self.engine.step()
        applied = bool(self.engine.was_step_applied())
        norm = self._grad_norm()
        if applied:
            for gradient in gradients:
                gradient.mul_(self._clip_factor())
            self._whole_optimizer.step()
            self._num_steps += 1
        self._whole_optimizer.zero_grad()
        return StepOutcome(grad_norm=norm, learning_rate=learning_rate, applied=applied, parts=self._parts())

    def forget_moments(self) -> None:
        # In place: DeepSpeed keeps views of them.
        for optimizer in (self._optimizer, self._whole_optimizer):
            for state in optimizer.state.values():
                for value in state.values():
                    value.zero_()

    def discard(self) -> None:
        self._whole_optimizer.zero_grad()
        forget_gradients(self.engine, self._zero_stage)

    def full_tensors(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for piece in self._pieces(names):
            weights = [self._weights[name] for name in piece]
            with deepspeed.zero.GatheredParameters(
                list(dict.fromkeys(weights)), enabled=self._zero_stage == 3
            ):
                tensors = [weight.detach() for weight in weights]
                if self._zero_stage == 3 and self._world.rank == 0:
                    tensors = [tensor.clone() for tensor in tensors]
            # Only after the gather is complete on this rank: it must not interleave with what the caller does.
            yield from zip(piece, tensors, strict=True)

    def save(self, folder: Path) -> None:
        tensors = {}
        names = self._adapters.original_names(self._weights)
        for name, tensor in self._adapters.merged(self.full_tensors, names, here=self._world.rank == 0):
            if self._world.rank == 0:
                tensors[name] = tensor.cpu().clone()
        if self._world.rank == 0:
            self._module.save_pretrained(folder, state_dict=tensors)  # type: ignore[operator]

    def save_state(self, folder: Path) -> None:
        """Each rank writes its own partitions and waits for nobody; rank 0 also what is outside the engine."""
        world = self._world
        progress = Progress(num_steps=self._num_steps, moment_steps=moment_steps(self._optimizer))
        write_state(folder, world.rank, world.size, self._fragments(whole=world.rank == 0), progress)

    @torch.no_grad()
    def load_state(self, folder: Path, *, average: bool = False) -> None:
        with open_state(folder, average=average) as files:
            partitioned = self._partitioned
            outside = {name: tuple(weight.shape) for name, weight in self._whole.items()}
            files.check({name: full_shape(weight) for name, weight in partitioned.items()} | outside)
            self._num_steps = files.progress.num_steps
            self.forget_moments()
            if files.has_moments:
                begin_moments(self._optimizer, self._masters(), files.progress.moment_steps)
                begin_moments(self._whole_optimizer, self._whole.values(), files.progress.moment_steps)
            fragments = list(self._fragments(whole=True))
            files.fill(fragments)
            if AVERAGE not in files.kinds:
                self._average.start_anew()
            by_name = {fragment.name: fragment for fragment in fragments}
            copy_to_weights(files, partitioned, by_name, self._zero_stage)

    def _fragments(self, *, whole: bool) -> Iterator[Fragment]:
        """`whole`: with what is outside the engine, which every rank has."""
        yield from partitioned_fragments(
            self.engine.optimizer, self._partitioned, self._average, self._zero_stage, self._world.rank
        )
        if whole:
            yield from whole_fragments(self._whole, self._whole_optimizer, self._average)

    def _masters(self) -> list[Tensor]:
        """Of this rank, of what is inside the engine."""
        return flat_partitions(self.engine.optimizer, self._zero_stage)

    @torch.no_grad()
    def update_average(self) -> None:
        self._average.update()

    def averages(self) -> Iterator[tuple[str, Tensor]]:
        everything = self._partitioned | self._whole
        shapes = [(name, full_shape(weight)) for name, weight in everything.items()]
        return whole_averages(list(self._fragments(whole=self._world.rank == 0)), shapes, self._world)

    def to_host(self, *, weights: bool) -> None:
        self._mover.to_host(weights=weights)
        states = self._whole_optimizer.state.values()
        moments = [value for state in states for value in state.values()]
        self._away.send([*moments, *self._average.values])
        if weights:
            self._away.send([*self._whole.values(), *self._module.buffers()])

    def to_device(self) -> None:
        self._mover.to_device()
        self._away.bring_back()

    def _whole_gradients(self) -> list[Tensor]:
        """Of the parameters outside the engine, over all ranks."""
        for weight in self._whole.values():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        gradients = [weight.grad for weight in self._whole.values() if weight.grad is not None]
        self._world.sum_in_place(gradients)
        for gradient in gradients:
            gradient.div_(self._loss_factor)
        return gradients

    def _grad_norm(self) -> float:
        """Of the whole gradient; of the step that is under way, which the engine itself learns of only afterwards."""
        return math.hypot(float(self.engine.optimizer._global_grad_norm), self._whole_norm)

    def _parts(self) -> PartNorms | None:
        if not self._whole:
            return None
        return PartNorms(
            head_gradient=self._whole_norm,
            backbone_gradient=float(self.engine.optimizer._global_grad_norm),
            head_weights=_norm([weight.detach() for weight in self._whole.values()]),
            backbone_weights=self._partitioned_norm(),
        )

    def _partitioned_norm(self) -> float:
        """Of what trains inside the engine; a rank of ZeRO 3 holds a piece of each, with padding behind the last."""
        weights = [weight for weight in self.engine.module.parameters() if weight.requires_grad]
        if self._zero_stage != 3:
            return _norm([weight.detach() for weight in weights])
        pieces = []
        for weight in weights:
            piece = weight.ds_tensor
            left = weight.ds_numel - self._world.rank * piece.ds_numel
            pieces.append(piece.detach()[: max(0, min(left, piece.ds_numel))])
        squared = torch.tensor([_norm(pieces) ** 2], dtype=torch.float64)
        self._world.sum_in_place([squared])
        return math.sqrt(float(squared))

    def _clip_factor(self) -> float:
        return min(1.0, self._max_grad_norm / max(self._grad_norm(), torch.finfo(torch.float32).tiny))

    def _clip(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Before each step of the inner optimizer. DeepSpeed's own clipping knows nothing of the value head."""
        factor = self._clip_factor()
        if factor < 1:
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    weight.grad.mul_(factor)

    def _pieces(self, names: Sequence[str]) -> Iterator[list[str]]:
        piece: list[str] = []
        num_elements = 0
        for name in names:
            size = getattr(self._weights[name], "ds_numel", self._weights[name].numel())
            if piece and num_elements + size > _PIECE_ELEMENTS:
                yield piece
                piece, num_elements = [], 0
            piece.append(name)
            num_elements += size
        yield piece


def _norm(tensors: Sequence[Tensor]) -> float:
    if not tensors:
        return 0.0
    return float(
        torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tensors), dtype=torch.float32)))
    )
