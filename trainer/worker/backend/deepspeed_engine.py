"""DeepSpeed's engine as a rank uses it: its settings, what it keeps off the device, and how it forgets gradients."""

import logging
import os

import deepspeed
import torch
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID
from torch import nn

from asyppo_async.config.learner import ZeroStage
from asyppo_async.errors import ConfigError
from asyppo_async.trainer.worker.control import Offload
from asyppo_async.trainer.worker.world import World

_BUCKET_ELEMENTS = 50_000_000
"""Of one reduction or gathering; a smaller model is one bucket."""


def open_engine(
    root: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    zero_stage: ZeroStage,
    whole_below: int,
    offload: Offload,
) -> deepspeed.DeepSpeedEngine:
    """`root` partitioned over the world, stepped by `optimizer`.

    Raises:
        ConfigError: DeepSpeed does not train weights of this type.
    """
    dtype = next(root.parameters()).dtype
    if dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"DeepSpeed trains float32 and bfloat16, got {dtype}; use backend = 'plain'")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # Its shared-memory collectives are compiled at the first start; gloo's are there.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Otherwise the launcher's; here it says which device the rank has been given.
    os.environ["LOCAL_RANK"] = str(next(root.parameters()).device.index or 0)
    world.open_default_group()
    bucket = min(_BUCKET_ELEMENTS, sum(weight.numel() for weight in root.parameters()))
    engine, *_ = deepspeed.initialize(
        model=root,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "managed_gradient_accumulation": False,
            "gradient_allreduce_op": "mean" if zero_stage == 3 else "sum",
            "communication_data_type": "fp32",
            "data_types": {"grad_accum_dtype": "fp32"},
            "bf16": {"enabled": dtype == torch.bfloat16, "check_grad_overflow": True},
            "gradient_clipping": 0.0,
            "steps_per_print": None,
            # Its own Adam for host memory is compiled at the first start; torch's fused one steps there as well, and
            # with the same optimizer everywhere an offloaded step is the step that it would have been.
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": zero_stage,
                "overlap_comm": False,
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": 2 * bucket,
                "stage3_prefetch_bucket_size": bucket,
                "stage3_param_persistence_threshold": whole_below,
                **_offloading(offload),
            },
        },
    )
    return engine


def _offloading(offload: Offload) -> dict[str, dict[str, str | bool]]:
    """DeepSpeed's own sections; what is not offloaded has none."""
    devices = {"offload_optimizer": offload.optimizer, "offload_param": offload.weights}
    return {
        name: {"device": device, "pin_memory": offload.pin_memory}
        for name, device in devices.items()
        if device != "none"
    }


def forget_gradients(engine: deepspeed.DeepSpeedEngine, zero_stage: ZeroStage) -> None:
    """What DeepSpeed itself does when it skips a step; it has no public way to forget accumulated gradients."""
    partitioned = engine.optimizer
    partitioned.zero_grad()
    if getattr(partitioned, "cpu_offload", False) or getattr(partitioned, "offload_optimizer", False):
        # What host memory holds is overwritten by the first backward of a step, and this is how it knows that it is.
        partitioned.reset_cpu_buffers()
        if zero_stage == 3:
            partitioned._offload_boundary_param_ids = set()
        else:
            partitioned.micro_step_id = INITIAL_MICRO_STEP_ID
            partitioned._offload_accumulated_param_ids = set()
    elif zero_stage == 3:
        partitioned.averaged_gradients = {}
    elif hasattr(partitioned, "all_grad_tensors"):
        for index in range(len(partitioned.bit16_groups)):
            partitioned.averaged_gradients[index] = partitioned.all_grad_tensors[index] = None
