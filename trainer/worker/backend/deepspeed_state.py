"""Where in ZeRO's flat partitions the elements of each parameter lie that this rank trains."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor

from asyppo_async.trainer.worker.backend.average import Average
from asyppo_async.trainer.worker.backend.fragments import state_of
from asyppo_async.trainer.worker.backend.state_files import WEIGHT, Fragment, StateFiles


def flat_partitions(optimizer: ZeROOptimizer, zero_stage: int) -> list[Tensor]:
    """The float32 masters of this rank: what the inner optimizer steps."""
    if zero_stage == 3:
        return list(optimizer.fp32_partitioned_groups_flat)
    # bfloat16 under stage 1 is a class of its own.
    of_bfloat16 = hasattr(optimizer, "fp32_groups_flat_partition")
    return list(
        optimizer.fp32_groups_flat_partition if of_bfloat16 else optimizer.single_partition_of_fp32_groups
    )


def partitioned_fragments(
    optimizer: ZeROOptimizer,
    weights: Mapping[str, Any],
    average: Average,
    zero_stage: int,
    rank: int,
) -> Iterator[Fragment]:
    """Of the parameters that the engine trains; those of which this rank has nothing are left out."""
    flats = flat_partitions(optimizer, zero_stage)
    for name, weight in weights.items():
        if zero_stage == 3:
            group, offset, size = optimizer.grad_position[optimizer.get_param_id(weight)]
            start = rank * size
            # The last ones are padded.
            size = min(size, weight.ds_numel - start)
        elif weight._hp_mapping is None:
            continue
        else:
            mapping = weight._hp_mapping
            group, start = mapping.param_group_index, mapping.lp_fragment_address.start
            offset, size = mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel
        if size > 0:
            state = state_of(flats[group], optimizer.optimizer, average)
            yield Fragment(
                name=name,
                shape=full_shape(weight),
                start=start,
                tensors={kind: values[offset : offset + size] for kind, values in state.items()},
            )


def full_shape(weight: Any) -> tuple[int, ...]:
    """Of a parameter, also of one of which this rank has a piece; DeepSpeed adds attributes of its own to it."""
    return tuple(getattr(weight, "ds_shape", weight.shape))


def copy_to_weights(
    files: StateFiles, weights: Mapping[str, Any], fragments: Mapping[str, Fragment], zero_stage: int
) -> None:
    """Give the weights themselves the values of the masters: every rank from the files, so that nobody waits."""
    for name, weight in weights.items():
        if zero_stage == 3:
            if name in fragments:
                master = fragments[name].tensors[WEIGHT]
                weight.ds_tensor.data.view(-1)[: master.numel()].copy_(master)
            if weight.ds_status != ZeroParamStatus.AVAILABLE:
                continue
        # One whole tensor at a time; under stage 3 only those that every rank keeps whole.
        whole = torch.empty(full_shape(weight), dtype=torch.float32)
        files.read(WEIGHT, name, 0, whole.view(-1))
        weight.data.copy_(whole)
