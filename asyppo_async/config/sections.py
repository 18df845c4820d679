"""The sections of a run's configuration. Only this package has defaults; each part receives its own section."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from asyppo_async.config.algorithm import AlgorithmSection
from asyppo_async.config.base import PositiveSeconds, Section, Share
from asyppo_async.config.checkpoint import CheckpointSection
from asyppo_async.config.critic import CriticSection
from asyppo_async.config.failures import FailuresSection
from asyppo_async.config.learner import LearnerSection, PublishedLora
from asyppo_async.config.placement import PlacementSection
from asyppo_async.config.pool import PoolSection, PretrainSection
from asyppo_async.config.selection import SelectionSection
from asyppo_async.config.task import TaskSection


class RunSection(Section):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the run; its folder is `folder/name`."""
    folder: Path = Path("runs")
    """Where run folders are made."""
    seed: int = Field(default=0, ge=0)
    """Seed of everything the trainer draws: prompt order, splits, mini-batches, head initialisation."""
    num_steps: int = Field(default=100, ge=1)
    """Training steps; the version of the weights at the end."""
    overwrite: bool = False
    """Replace a run folder of the same name instead of refusing to start."""
    restarts: int = Field(default=0, ge=0)
    """How often the run may come back by itself from its last checkpoint after a part of it has died."""
    join_timeout_s: PositiveSeconds = 300
    """How long to wait for fleet servers and worker groups at start."""
    request_timeout_s: PositiveSeconds = 600
    """Deadline of one request to a worker group (forward, train, send)."""
    worker_host: str = "127.0.0.1"
    """Address of this machine on which the run waits for workers; another machine's need one that they reach."""
    worker_port: int = Field(default=0, ge=0, le=65535)
    """0: a free port, which is printed."""
    silent_after_s: PositiveSeconds = 30
    """A worker rank that sends no heartbeat (every 2 s) for so long is lost."""
    stall_after_s: PositiveSeconds = 60
    """Without progress for so long, what each loop waits for is logged."""
    fail_after_s: PositiveSeconds = 900
    """Without progress for so long, the run fails."""
    debug: bool = False
    """Check after every decision what must hold of draws, batches and servers; the run ends where it does not."""


class ActorSection(LearnerSection):
    model: Path
    """Folder of the initial policy (Hugging Face format) with its tokenizer."""
    reset_optimizer: bool = False
    """Forget the optimizer's moments before each training step, that is, after each publication (GLM-5)."""
    float32_head: bool = False
    """Logits are products in float32 of bfloat16 states and bfloat16 head weights, in training and at the servers:
    those have to run with --float32-head too, which is checked; an embedded one does."""
    ema_decay: float = Field(default=0.0, ge=0, lt=1)
    """Of a moving average of the weights in float32, which follows them after every training step that moved them; 0:
    none. It is kept beside the masters, saved with them, and `asyppo-train export --ema` writes it."""
    reference: Path | Literal["initial", "ema"] | None = None
    """Folder of a frozen model that `algorithm.kl_coefficient` holds the policy to; `initial`: the weights that the run
    starts from; `ema`: the moving average of `ema_decay`, as it is before each training step. Every rank holds all of
    it, but for `initial` where adapters train (`lora_rank`): those weights are there. None: no such model; a KL is over
    the loss's own reference."""
    routing_replay: bool = False
    """R3: the forward of a mixture of experts uses the experts that the engine used; the engine must return them."""


class SamplingSection(Section):
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    """1 is off. Below 1 the behaviour is not the model's own distribution: needs `kept_tokens`."""
    top_k: int = Field(default=0, ge=0)
    """0 is off; as `top_p`."""
    kept_tokens: bool = False
    """The trainer rebuilds the set of tokens that top-k and top-p keep and renormalises its log-probs over it."""
    max_tokens: int = Field(default=256, ge=1)
    """Longest response; what becomes of one that reaches it, `algorithm.truncated` says."""


class BatchSection(Section):
    prompts: int = Field(default=32, ge=1)
    """Groups of one training step (B)."""
    group_size: int = Field(default=8, ge=1)
    """Responses sampled for each prompt (K)."""


class StalenessSection(Section):
    max_staleness: int = Field(default=1, ge=0)
    """No token older than so many versions has weight in a policy update; 0 is synchronous training."""
    on_stale: Literal["wait", "mask", "drop"] = "wait"
    """When a group is not there on its last step in time: wait for it, mask its stale tokens later, or drop it."""
    lead: Literal["saturated", "auto"] = "auto"
    """How far generation runs ahead: as far as the bound allows, or only as far as the trainer needs."""
    max_attempts: int = Field(default=3, ge=1)
    """How often one draw of a prompt is tried before it is listed as dropped."""
    max_concurrent_groups: int = Field(default=512, ge=1)
    """Groups that are generated at once, over the whole fleet."""
    max_replacements_per_step: int = Field(default=1000, ge=1)
    """Draws that may be filtered or dropped between two batches before the run ends with an error."""


class WeightsSection(Section):
    way: Literal["staged", "direct", "folder"] = "staged"
    """staged: bytes arrive in the servers' host memory while they generate. direct: in their engines, which pause for
    it; no second copy. folder: as files in `folder`, for servers that share no such network with the trainer."""
    encoding: Literal["full", "delta"] = "full"
    """delta: only what has changed since the version that all servers hold; needs actor.dtype = "bfloat16", and one
    more copy of the weights in the trainer's host memory."""
    lora: PublishedLora = "merged"
    """What is published of an actor with adapters (`actor.lora_rank`). merged: whole weights, adapters added, which any
    server takes. adapter: the adapters alone, to servers that run with --enable-lora."""
    folder: str = ""
    """Of the way `folder`: a path that the trainer and every server see, or a URL that fsspec knows (`s3://bucket/runs`,
    with the package of its store installed at both ends, and access from their environments)."""
    backend: Literal["gloo", "nccl"] = "gloo"
    bucket_bytes: int = Field(default=64 * 2**20, ge=1024)
    kv_on_update: Literal["keep", "recompute"] = "keep"
    """What becomes of the KV of requests in flight when the weights change."""
    min_deadline_s: PositiveSeconds = 30
    """Shortest deadline of one leg of a publication; longer ones follow from bytes and measured rate."""
    lease_s: PositiveSeconds = 60
    """A server resets an update whose trainer is silent for so long."""
    on_failed_server: Literal["leave_out", "fail"] = "leave_out"
    """Of several, one that cannot load a version, or fails its probe twice: go on without it, or fail the run."""
    num_probe_sequences: int = Field(default=4, ge=1)
    """Continuations that are sampled after each publication to compare the engine with the trainer."""
    probe_tokens: int = Field(default=16, ge=1)
    """Length of each sampled continuation."""
    probe_long_every: int = Field(default=50, ge=0)
    """Publications between two in which one sequence of the run's greatest length is scored too; it also is where a
    server is new. 0: only there."""
    probe_tolerance: float = Field(default=0.0, ge=0)
    """Largest mean gap (nats) of a probe; 0: ten times the gap measured at the first publication, at least 1e-5."""


class EvaluationSection(Section):
    every_steps: int = Field(default=0, ge=0)
    """Evaluate after every so many steps; 0: only before and after the run."""
    samples_per_prompt: int = Field(default=8, ge=1)
    """Responses at temperature 1 for each held-out prompt (avg@k)."""
    greedy: bool = True
    """Also one greedy response for each prompt."""
    hold_s: PositiveSeconds = 20
    """How long a publication may wait for an evaluation that is under way."""
    num_prompts: int = Field(default=0, ge=0)
    """Held-out prompts of the evaluations within the run; 0: all of them."""
    keep_best_by: Literal["none", "accuracy", "greedy_accuracy", "mean_reward"] = "none"
    """Keep the actor of the evaluation in which this was highest, in the run folder's `best/`."""


class FleetSection(Section):
    servers: tuple[str, ...] = ()
    """`host:port` of each, or `dns:///name:port` for all of a name, also those to come; none: one server is started on
    this machine and ends with the run."""
    listen: str = ""
    """HOST:PORT where servers may join the run (`asyppo-fleet serve --join`); empty: nobody may."""
    listen_insecure: bool = False
    """Let anybody who reaches `listen` join, without a token: for closed networks only."""
    listen_tls_cert: Path | None = None
    """PEM of the certificate of `listen`."""
    listen_tls_key: Path | None = None
    """PEM of its private key."""
    token_file: Path | None = None
    """File with the bearer token that the servers ask for; none: the variable ASYPPO_FLEET_TOKEN, if it is set."""
    tls_ca: Path | None = None
    """PEM of the authority that signed the servers' certificates; none: no TLS."""
    tls_cert: Path | None = None
    """PEM of the trainer's own certificate, where servers ask for one."""
    tls_key: Path | None = None
    """PEM of its private key."""
    max_num_seqs: int = Field(default=128, ge=2)
    """Samples that an embedded server runs at once."""
    max_model_len: int = Field(default=0, ge=0)
    """Longest prompt plus response of an embedded server; 0: what the model takes."""
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """KV cache of an embedded CPU server."""
    num_threads: int = Field(default=0, ge=0)
    """CPU threads of an embedded server; 0: vLLM's own choice."""
    silence_s: PositiveSeconds = 10
    """A server that says nothing for so long while groups wait for it, no token and no life sign, is given up."""
    group_deadline_s: PositiveSeconds = 600
    """A group that is not finished in this time is failed and drawn again."""
    extra_args: tuple[str, ...] = ()
    """Further options for `asyppo-fleet serve` of an embedded server."""


class TrackingSection(Section):
    """Where the numbers of a run go besides `metrics.jsonl`."""

    tensorboard: bool = True
    """Event files in the run folder: `tensorboard --logdir runs`."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Weights & Biases (extra `wandb`). offline: into the run folder, for `wandb sync`."""
    wandb_project: str = "asyppo-async"
    """Project that the run appears in."""
    report: bool = True
    """Write `report.html` at the end of the run; `asyppo-train report RUN` does it at any time."""
    samples_per_step: int = Field(default=2, ge=0)
    """Responses of each step that are kept as text with their rewards, in `samples.jsonl`."""


class SimulateSection(Section):
    """What `asyppo-train simulate` assumes of the machines; a run does not read it."""

    steps: int = Field(default=40, ge=2)
    """Steps that are simulated and counted, after those in which the queue fills."""
    num_servers: int = Field(default=1, ge=1)
    gpus_per_server: int = Field(default=1, ge=1)
    trainer_gpus: int = Field(default=1, ge=1)
    """GPUs of actor and critics together."""
    least_trainer_gpus: int = Field(default=1, ge=1)
    """What the trainer fits on; a recommended division gives it a multiple of this."""
    alone_tokens_per_s: float = Field(default=60, gt=0)
    """Speed of one sample alone on a server."""
    full_tokens_per_s: float = Field(default=2500, gt=0)
    """Speed of a server that runs `fleet.max_num_seqs` samples, over all of them."""
    prompt_tokens: int = Field(default=256, ge=0)
    prefill_tokens_per_s: float = Field(default=20_000, gt=0)
    """Speed at which a server reads prompts, and with `weights.kv_on_update = "recompute"` what is in flight."""
    median_tokens: float = Field(default=0, ge=0)
    """Median length of a response; 0: half of `sampling.max_tokens`."""
    prompt_sigma: float = Field(default=0.7, ge=0)
    """Spread between prompts: standard deviation of the log length. A long prompt is long on every attempt."""
    member_sigma: float = Field(default=0.3, ge=0)
    """Spread within a group."""
    train_tokens_per_s: float = Field(default=1000, gt=0)
    """Response tokens that one trainer GPU takes through a whole step, critics included."""
    step_overhead_s: float = Field(default=1, ge=0)
    """Part of a step that does not depend on tokens or GPUs."""
    publication_s: float = Field(default=5, ge=0)
    """From the end of a step until the weights are everywhere, while servers generate."""
    pause_s: float = Field(default=0.5, ge=0)
    """How long servers stand still to load them."""
    filtered_share: Share = 0.0
    """Groups that are left out, for equal rewards."""
    failed_share: Share = 0.0
    """Responses whose reward fails."""


class TrainConfig(Section):
    """A whole run."""

    run: RunSection = RunSection()
    actor: ActorSection
    critic: CriticSection = CriticSection()
    placement: PlacementSection = PlacementSection()
    task: TaskSection = TaskSection()
    sampling: SamplingSection = SamplingSection()
    batch: BatchSection = BatchSection()
    staleness: StalenessSection = StalenessSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    selection: SelectionSection = SelectionSection()
    weights: WeightsSection = WeightsSection()
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    failures: FailuresSection = FailuresSection()
    fleet: FleetSection = FleetSection()
    tracking: TrackingSection = TrackingSection()
    pool: PoolSection = PoolSection()
    pretrain: PretrainSection = PretrainSection()
    simulate: SimulateSection = SimulateSection()

    def without_training_of_actor(self) -> Self:
        """As a program reads it that only publishes the actor's model: no adapters, whole weights."""
        actor = self.actor.model_copy(update={"lora_rank": 0, "lora_targets": ()})
        return self.model_copy(
            update={"actor": actor, "weights": self.weights.model_copy(update={"lora": "merged"})}
        )
