"""Settings of `asyppo-fleet serve`."""

import ipaddress
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from asyppo_async.config.base import PositiveSeconds, Section
from asyppo_async.config.sections import Dtype


class ServeConfig(Section):
    """One fleet server."""

    model: Path
    """Folder of the model to serve (Hugging Face format, safetensors)."""
    host: str = "127.0.0.1"
    """Address to listen on; one beyond loopback needs --insecure."""
    port: int = Field(default=50051, ge=0, le=65535)
    """Port to listen on; 0: a free one, reported in the ready file."""
    insecure: bool = False
    """Allow a host beyond loopback, without encryption or authentication: for closed networks only."""
    ready_file: Path | None = None
    """Write one JSON line with host, port and pid to this file when the server is ready."""
    dtype: Dtype = "float32"
    """Type that the engine computes in and weights are received in."""
    max_num_seqs: int = Field(default=128, ge=2)
    """Samples that the engine runs at once, probe slots included."""
    max_model_len: int = Field(default=0, ge=0)
    """Longest prompt plus response in tokens; 0: what the model takes."""
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """KV cache of a CPU engine in GiB; a GPU engine sizes its own."""
    num_threads: int = Field(default=0, ge=0)
    """CPU threads of each engine worker; 0: the engine's own choice."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Engine workers that share the model."""
    probe_slots: int = Field(default=2, ge=1)
    """Of max_num_seqs, how many are kept free for the probe after each weight update."""
    max_queued_samples: int = Field(default=4096, ge=1)
    """Samples that may wait for a slot; beyond it a request is told to come back later."""
    stream_interval: int = Field(default=16, ge=1)
    """Tokens of a sample that are sent together; the first is sent at once."""
    drain_grace_s: PositiveSeconds = 30
    """After the first signal, how long running requests may take to finish."""

    @field_validator("host")
    @classmethod
    def _is_a_host(cls, host: str) -> str:
        if not host or "/" in host or " " in host:
            raise ValueError(f"a host name or address is needed, got {host!r}")
        return host

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.probe_slots >= self.max_num_seqs:
            raise ValueError(
                f"probe_slots = {self.probe_slots} leaves no slot of max_num_seqs = {self.max_num_seqs}; "
                "use fewer probe slots or more sequences"
            )
        if not self.insecure and not _is_loopback(self.host):
            raise ValueError(
                f"host {self.host} can be reached from other machines and this version has no encryption or "
                "authentication; use 127.0.0.1, or --insecure inside a closed network"
            )
        return self


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
