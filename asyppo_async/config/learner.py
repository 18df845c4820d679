"""What the actor's and the critics' sections have in common: how a model is held, cut and trained."""

from typing import Annotated, Literal

from pydantic import Field

from asyppo_async.config.base import Section

Dtype = Literal["float32", "bfloat16"]
TrainingBackend = Literal["plain", "deepspeed"]
ZeroStage = Literal[1, 2, 3]
Packing = Literal["padded", "packed", "auto"]
RateCurve = Literal["cosine", "linear"]
PublishedLora = Literal["merged", "adapter"]
OffloadDevice = Literal["none", "cpu"]


class OffloadSection(Section):
    """What DeepSpeed keeps off the device for the whole run: memory of the device against time."""

    optimizer: OffloadDevice = "none"
    """Where masters and Adam's moments are, and where the optimizer steps; cpu is host memory."""
    weights: OffloadDevice = "none"
    """Where partitioned weights wait until a layer needs them; needs zero_stage 3."""
    pin_memory: bool = True
    """Lock what is in host memory there: copies are faster, and the machine cannot page it out."""


class LearnerSection(Section):
    dtype: Dtype = "float32"
    """Type of the weights in training; the actor's are published in it."""
    backend: TrainingBackend = "plain"
    """Training engine of the group: plain torch, every rank with the whole model; or DeepSpeed, which partitions it."""
    zero_stage: ZeroStage = 2
    """What DeepSpeed partitions over the ranks: 1 the optimizer's state, 2 gradients as well, 3 weights as well."""
    zero_whole_below: int = Field(default=100_000, ge=0)
    """Stage 3 leaves tensors of fewer elements whole on every rank, since gathering them costs more than it saves."""
    offload: OffloadSection = OffloadSection()
    """What DeepSpeed keeps in host memory."""
    num_ranks: int = Field(default=1, ge=1)
    """Ranks of the group (of each critic's), on all machines."""
    local_ranks: int | None = Field(default=None, ge=0)
    """How many of them this machine starts; the others join by `asyppo-train worker`. None: all."""
    devices: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Indices of the GPUs that the ranks on each machine use, in turn. Empty: those that come next."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """The highest of the schedule."""
    learning_rate_warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises linearly."""
    final_learning_rate: float | None = Field(default=None, ge=0)
    """Where the learning rate has come down to after `schedule_steps`; none: it stays."""
    learning_rate_curve: RateCurve = "cosine"
    """Along which it comes down: half a cosine, or a line."""
    schedule_steps: int = Field(default=0, ge=0)
    """Optimizer steps of the whole schedule, its rise included; 0: those of the run."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Of matrices; norms and biases have none."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Longer gradients of the model are shortened to this norm, over all its tensors together."""
    epochs: int = Field(default=1, ge=1)
    """Passes over what is trained of each batch (UTD, update to data)."""
    mini_batches: int = Field(default=2, ge=1)
    """Optimizer steps of one pass."""
    lora_rank: int = Field(default=0, ge=0)
    """Rank of LoRA adapters, which train in the place of the model's own weights: those stay what they are. 0: the
    weights train. Adapters take about ten times the learning rate of weights."""
    lora_alpha: float = Field(default=32, gt=0)
    """Their product counts `lora_alpha / lora_rank` times."""
    lora_targets: tuple[str, ...] = ()
    """Linear layers that get one, by the ends of their names (`q_proj`, `mlp.up_proj`); empty: all of the backbone."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Tokens, padding included, of one forward and backward."""
    packing: Packing = "auto"
    """Whether responses of a micro-batch are padded to one length or lie end to end, each seeing itself alone; auto:
    packed if the model takes it, which is tried at the start."""
    recompute: bool = False
    """Keep only the inputs of each layer for the backward, which computes the layer again: less memory, about a third
    more arithmetic."""
    num_threads: int = Field(default=0, ge=0)
    """CPU threads of each rank; 0: all that the process may use."""
    non_finite_budget: int = Field(default=5, ge=0)
    """Optimizer steps that may be skipped for a non-finite loss or gradient before the run fails."""

    def schedule_steps_in(self, training_steps: int) -> int:
        """`schedule_steps`, or the optimizer steps of a run of so many training steps."""
        return self.schedule_steps or training_steps * self.epochs * self.mini_batches
