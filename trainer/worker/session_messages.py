"""What the coordinator and the actor group say to each other about weight sessions: typed values, no I/O."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStore:
    """Where rank 0's store listens, for one epoch of the weight session."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendResult:
    checksums: tuple[int, ...]
    """XXH3-64 of each tensor's bytes as sent, in manifest order."""
    num_bytes: int
    gather_s: float
    wire_s: float
    is_delta: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession:
    """Open the store of a weight session at rank 0."""

    host: str
    epoch: int
    world_size: int
    """Of the session: rank 0 and the servers' workers."""
    backend: Literal["gloo", "nccl"]
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSession:
    """Join the process group of the open session; returns when all its members have."""

    epoch: int
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SendWeights:
    version: int
    deadline_s: float
    base_version: int = -1
    """Version that every receiver holds: a delta against it may be sent. -1: send everything."""
    keep: bool = False
    """Keep what is sent in host memory, for the delta of the next one."""
    folder: str = ""
    """Write files there instead of sending over the session's group; empty: send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSession:
    pass
