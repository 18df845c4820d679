"""How a rank finds its place in a run and keeps its state, and how both ends know that the other one lives."""

from dataclasses import dataclass
from typing import Literal

from asyppo_async.config.critic import CriticPartName
from asyppo_async.config.learner import OffloadDevice, Packing, PublishedLora, TrainingBackend, ZeroStage
from asyppo_async.trainer.worker.learning_rate import LearningRate
from asyppo_async.trainer.worker.session_messages import SessionStore
from asyppo_async.weights.manifest import Manifest

WorkerRole = Literal["actor", "critic"]
ComputeDtype = Literal["float32", "bfloat16", "float64"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """What DeepSpeed keeps off the device; `config.learner.OffloadSection` explains each."""

    optimizer: OffloadDevice = "none"
    weights: OffloadDevice = "none"
    pin_memory: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a rank needs to know of the configuration; the coordinator's configuration is the only one."""

    role: WorkerRole
    model: str
    """Folder of the initial model, as the worker's machine sees it."""
    dtype: ComputeDtype
    """Of the weights; float64 is for exact comparisons."""
    backend: TrainingBackend
    zero_stage: ZeroStage
    """Of DeepSpeed."""
    zero_whole_below: int
    """ZeRO 3 leaves tensors of fewer elements whole on every rank."""
    learning_rate: LearningRate
    weight_decay: float
    max_grad_norm: float
    micro_batch_tokens: int
    packing: Packing
    recompute: bool
    """Layers are computed again in the backward instead of kept."""
    num_threads: int
    """0: all that the process may use."""
    non_finite_budget: int
    seed: int
    bucket_bytes: int
    """Largest bucket of a publication; read by the actor's rank 0."""
    collective_deadline_s: float
    float32_head: bool = False
    """The actor's logits are computed in float32."""
    ema_decay: float = 0.0
    """Of the moving average of the weights; 0: none is kept."""
    reference: str = ""
    """Folder of the model that a KL penalty is over; empty: none. Read by the actor."""
    moving_reference: bool = False
    """The reference becomes the moving average after every training step."""
    routing_replay: bool = False
    """The actor will be told which experts to use, so it must have some."""
    lora_rank: int = 0
    """Of adapters, which train alone; 0: the weights train."""
    lora_alpha: float = 32.0
    lora_targets: tuple[str, ...] = ()
    """Ends of names of the layers with adapters; empty: all linear ones of the backbone."""
    publish: PublishedLora = "merged"
    """What the actor publishes where it has adapters."""
    frozen: tuple[CriticPartName, ...] = ()
    """Parts of a critic's backbone that do not train."""
    head_std: float = 0.0
    """Of a critic's fresh value head; 0: 1 / (H + 1)."""
    offload: Offload = Offload()
    """Of DeepSpeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A rank's first message."""

    role: WorkerRole
    name: str
    """That the coordinator gave to a process which it started; empty for others."""
    host: str
    """Address under which the other ranks of its group reach it."""
    pid: int
    devices: tuple[str, ...]
    critic: int | None
    """Critic that the rank insists on; None: the coordinator chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The run has no place for this worker."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A rank's place. Rank 0 answers with the address of its group's store."""

    rank: int
    world_size: int
    critic: int | None
    settings: WorkerSettings
    device: str
    """One of those that the rank has named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    store: SessionStore | None
    """None on the other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Join the group's world and load the model."""

    store: SessionStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What one rank needs of its device."""

    device: str
    """Names it among all machines of a run."""
    on_host: bool
    """The device is a CPU."""
    free_bytes: int | None
    """Before the model was loaded; None: unknown."""
    weight_bytes: int
    """Of everything that is loaded, frozen models included."""
    state_bytes: int
    """Of gradients, masters and moments, which come with the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    vocab_size: int
    """Rows of the embedding."""
    tokenizer_fingerprint: str
    """Empty where the model's folder has no tokenizer."""
    num_parameters: int
    manifest: Manifest | None
    """Of the actor; None for a critic, whose weights go nowhere."""
    footprint: Footprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Reply to a request that has no result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """From a rank every two seconds; the coordinator sends it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledged:
    """A request has arrived; its answer follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A request failed."""

    kind: str
    """Class of the error."""
    message: str
    fatal: bool
    """The rank ends: its state is not what its peers think it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """End now, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveState:
    """Write what training goes on from: weights, optimizer, schedule, random state. Every rank takes part."""

    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreState:
    """Go on from what `SaveState` wrote."""

    folder: str
    average: bool = False
    """With the moving average in the place of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveToHost:
    """Make room on the device for another group: masters and moments move to host memory, and weights if asked."""

    weights: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveToDevice:
    """Take back what `MoveToHost` moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeeFolder:
    """Read the coordinator's `nonce` in the folder, and write it back under this rank's own name."""

    folder: str
    nonce: str
