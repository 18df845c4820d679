"""DeepSpeed's engine as this project uses it: the caller accumulates, clips and knows the schedule."""

import logging
import os

import deepspeed
import torch
from torch import nn

from asyppo_async.config.learner import ZeroStage
from asyppo_async.errors import ConfigError
from asyppo_async.trainer.worker.world import World

_BUCKET_ELEMENTS = 50_000_000
"""Of one reduction or gathering; a smaller model is one bucket."""


def open_engine(
    root: nn.Module, optimizer: torch.optim.Optimizer, world: World, zero_stage: ZeroStage, whole_below: int
) -> deepspeed.DeepSpeedEngine:
    """Have `root` partitioned over the world.

    Args:
        root: what the engine runs.
        optimizer: over the trained parameters of it.
        world: all its ranks.
        zero_stage: 1, 2 or 3.
        whole_below: stage 3 leaves tensors of fewer elements whole.

    Raises:
        ConfigError: DeepSpeed does not train this type.
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
            "zero_optimization": {
                "stage": zero_stage,
                "overlap_comm": False,
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": 2 * bucket,
                "stage3_prefetch_bucket_size": bucket,
                "stage3_param_persistence_threshold": whole_below,
            },
        },
    )
    return engine
