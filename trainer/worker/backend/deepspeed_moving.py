"""What DeepSpeed holds on a device, moved to host memory and back between the turns of groups that share it."""

import deepspeed
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State
from torch import Tensor

from asyppo_async.config.learner import ZeroStage
from asyppo_async.trainer.worker.away import Away
from asyppo_async.trainer.worker.control import Offload


class Mover:
    """Of one engine. DeepSpeed moves its own buffers; of stage 3 it moves no optimizer but its own fused Adam."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, zero_stage: ZeroStage, offload: Offload) -> None:
        self._engine = engine
        self._is_stage_3 = zero_stage == 3
        self._offload = offload
        self._away = Away()
        self._weights_are_away = False
        self._own_masters = self._is_stage_3 and self._share_masters()

    def to_host(self, *, weights: bool) -> None:
        """Optimizer and buffers of gradients, and `weights` if asked; what is offloaded for good stays where it is."""
        weights = weights and self._offload.weights == "none"
        kinds = {State.lp_grads}
        if self._is_stage_3:
            kinds.add(State.contiguous_grad_buffer)
            self._away.send(self._optimizer_tensors())
        else:
            kinds |= {State.hp_params, State.optim_states}
        if weights:
            kinds.add(State.lp_params)
        if self._offload.weights == "none":  # DeepSpeed moves nothing of an engine whose weights it offloads
            self._engine.offload_states(include=kinds, pin_memory=torch.cuda.is_available())
        if weights and self._own_masters:
            for master in self._engine.optimizer.fp32_partitioned_groups_flat:
                master.data = master.data.new_empty(0, device="cpu")  # else it would hold the weights' memory
        self._weights_are_away = weights

    def to_device(self) -> None:
        """All that `to_host` moved."""
        if self._offload.weights == "none":
            self._engine.reload_states()
        self._away.bring_back()
        if self._weights_are_away and self._own_masters:
            partitioned = self._engine.optimizer
            pairs = zip(
                partitioned.fp32_partitioned_groups_flat,
                partitioned.fp16_partitioned_groups_flat,
                strict=True,
            )
            for master, weight in pairs:
                master.data = weight.data
        self._weights_are_away = False

    def _share_masters(self) -> bool:
        """Whether float32 weights are their own masters (stage 3)."""
        partitioned = self._engine.optimizer
        masters, weights = partitioned.fp32_partitioned_groups_flat, partitioned.fp16_partitioned_groups_flat
        return len(masters) == len(weights) and all(
            master is weight for master, weight in zip(masters, weights, strict=True)
        )

    def _optimizer_tensors(self) -> list[Tensor]:
        if self._offload.optimizer != "none":
            return []
        partitioned = self._engine.optimizer
        states = partitioned.optimizer.state.values()
        tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return tensors if self._own_masters else [*tensors, *partitioned.fp32_partitioned_groups_flat]
