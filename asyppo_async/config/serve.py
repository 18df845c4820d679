"""Settings of `asyppo-fleet serve`."""

from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from asyppo_async.config.base import PositiveSeconds, Section
from asyppo_async.config.hosts import is_loopback
from asyppo_async.config.learner import Dtype
from asyppo_async.errors import ConfigError

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""For which vLLM has room."""


class ServeConfig(Section):
    """One fleet server."""

    model: Path
    """Folder of the model to serve (Hugging Face format, safetensors)."""
    host: str = "127.0.0.1"
    """Address to listen on; one beyond loopback needs TLS, a token, or --insecure."""
    port: int = Field(default=50051, ge=0, le=65535)
    """Port to listen on; 0: a free one, reported in the ready file."""
    insecure: bool = False
    """Allow a host beyond loopback, without encryption or authentication: for closed networks only."""
    token_file: Path | None = None
    """Ask every call for a bearer token. A line: TOKEN [generate,weights,admin]. Or set ASYPPO_FLEET_TOKEN."""
    tls_cert: Path | None = None
    """PEM of this server's certificate (chain); with --tls-key, every connection is encrypted."""
    tls_key: Path | None = None
    """PEM of its private key."""
    tls_client_ca: Path | None = None
    """PEM of the authority whose certificates clients must show (mutual TLS)."""
    join: str = ""
    """HOST:PORT of a run's coordinator (its fleet.listen) that is asked to use this server."""
    join_token_file: Path | None = None
    """The run's token, shown to the coordinator. Or set ASYPPO_FLEET_TOKEN."""
    join_tls_ca: Path | None = None
    """PEM of the authority of the coordinator's certificate: join over TLS."""
    advertise: str = ""
    """HOST or HOST:PORT at which the coordinator reaches this server; empty: from --host and the way there."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus endpoint (HTTP, with the server's TLS if it has one); 0: a free one; none: no endpoint."""
    metrics_host: str = "127.0.0.1"
    """Address of the Prometheus endpoint; one beyond loopback needs TLS or --insecure."""
    log_json: bool = False
    """Log one JSON object a line."""
    log_calls: bool = False
    """Log a line for every call, with its request and prompt ids."""
    ready_file: Path | None = None
    """Write one JSON line with host, port, metrics port and pid to this file when the server is ready."""
    dtype: Dtype = "float32"
    """Type that the engine computes in and weights are received in: float32 or bfloat16."""
    float32_head: bool = False
    """Compute logits in float32 although --dtype is bfloat16, as a trainer with actor.float32_head does."""
    max_num_seqs: int = Field(default=128, ge=2)
    """Samples that the engine (each replica) runs at once, probe slots included."""
    max_model_len: int = Field(default=0, ge=0)
    """Longest prompt plus response in tokens; 0: what the model takes."""
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """KV cache of a CPU engine in GiB; a GPU engine sizes its own."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of each GPU's memory that its engine may take, weights and KV cache together; of no use on a CPU."""
    num_threads: int = Field(default=0, ge=0)
    """CPU threads of each engine worker; 0: the engine's own choice."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Engine workers that share the model."""
    data_parallel_size: int = Field(default=1, ge=1)
    """Replicas of the model behind this server, each with --max-num-seqs and --tensor-parallel-size of its own."""
    enable_lora: bool = False
    """Versions are adapters (LoRA) over this model, not whole weights; none at first. See docs/publication.md."""
    max_lora_rank: int = 16
    """Largest rank of an adapter, with --enable-lora: 1, 8, 16, 32, 64, 128, 256, 320 or 512."""
    probe_slots: int = Field(default=2, ge=1)
    """Of max_num_seqs, how many are kept free for the probe after each weight update."""
    max_queued_samples: int = Field(default=4096, ge=1)
    """Samples that may wait for a slot; beyond it a request is told to come back later."""
    max_samples_per_call: int = Field(default=1024, ge=1)
    """Samples that one call may ask for."""
    max_calls: int = Field(default=4096, ge=1)
    """Generate calls at once; beyond it a request is told to come back later."""
    max_message_mib: int = Field(default=64, ge=1, le=2047)
    """Largest message that the server reads; a larger one is refused unread."""
    max_kept_tokens: int = Field(default=64, ge=0, le=65535)
    """Largest top_k of a request that wants to know what its tokens were sampled from."""
    engine_silence_s: PositiveSeconds = 120
    """An engine that makes no token and answers no question for so long has failed."""
    stream_interval: int = Field(default=32, ge=1)
    """Tokens of a sample that the engine hands over together; the first comes at once, and none waits for chunk_s."""
    chunk_tokens: int = Field(default=1024, ge=1)
    """Tokens of a call that are sent together, of all its samples; ends of samples do not wait for them."""
    chunk_s: PositiveSeconds = 1.0
    """A token of a slow response waits so long at most for others to travel with, also in the engine."""
    drain_grace_s: PositiveSeconds = 30
    """After the first signal, how long running requests may take to finish."""

    @property
    def num_workers(self) -> int:
        """Engine processes, each of which receives weights."""
        return self.tensor_parallel_size * self.data_parallel_size

    @field_validator("host")
    @classmethod
    def _is_a_host(cls, host: str) -> str:
        if not host or "/" in host or " " in host:
            raise ValueError(f"a host name or address is needed, got {host!r}")
        return host

    @field_validator("max_lora_rank")
    @classmethod
    def _is_a_rank_of_the_engine(cls, rank: int) -> int:
        if rank not in LORA_RANKS:
            raise ValueError(f"the engine makes room for ranks {', '.join(map(str, LORA_RANKS))}, got {rank}")
        return rank

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.probe_slots >= self.max_num_seqs:
            raise ValueError(
                f"probe_slots = {self.probe_slots} leaves no slot of max_num_seqs = {self.max_num_seqs}; "
                "use fewer probe slots or more sequences"
            )
        if self.float32_head and self.dtype == "float32":
            raise ValueError("--float32-head changes nothing with --dtype float32; leave it out")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together; name both or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-client-ca needs --tls-cert and --tls-key")
        return self

    def check_exposure(self, has_token: bool) -> None:
        """Raise `ConfigError` where strangers could call this server (invariant 9).

        Args:
            has_token: Whether calls need a token, from a file or from the environment.
        """
        if self.metrics_port is not None and not (
            self.insecure or self.tls_cert is not None or is_loopback(self.metrics_host)
        ):
            raise ConfigError(
                f"metrics_host {self.metrics_host} can be reached from other machines: encrypt it (--tls-cert), or use "
                "--insecure inside a closed network"
            )
        if self.insecure or has_token or self.tls_client_ca is not None or is_loopback(self.host):
            return
        raise ConfigError(
            f"host {self.host} can be reached from other machines: ask for a token (--token-file) or for client "
            "certificates (--tls-client-ca), or use --insecure inside a closed network"
        )
