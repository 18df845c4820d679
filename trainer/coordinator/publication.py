"""What one publication measured."""

from dataclasses import dataclass, replace
from typing import Self

from asyppo_async.metrics import Metrics
from asyppo_async.trainer.coordinator.probing import ServerGap, combined
from asyppo_async.weights.manifest import Dtype
from asyppo_async.weights.probe import ProbeGap

FLOOR_FACTOR = 10.0
SMALLEST_BOUND = 1e-5
"""Nats; below it float32 rounding alone may fail a probe."""
LARGEST_FLOOR: dict[Dtype, float] = {"float32": 1e-3, "bfloat16": 0.1}
"""Nats; a first gap beyond it is no rounding: the server holds other weights, or computes something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds of each phase; of several servers the slowest."""

    session_s: float
    """Meeting anew, where other members take part than before; next to nothing otherwise."""
    stage_s: float
    """All bytes, beside generation; from the first request to the last answer."""
    gather_s: float
    """Of it: the sender getting its tensors together."""
    wire_s: float
    """Of it: the sender waiting for the wire."""
    commit_s: float
    """The whole commit; the actor scores the fixed sequences beside it."""
    pause_s: float
    load_s: float
    resume_s: float
    probe_s: float
    """The servers' half of the probe."""
    score_s: float
    """The actor's scores of the continuations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    version: int
    num_bytes: int
    """On the wire to each server, or in files, of the last attempt."""
    full_bytes: int
    """Of all tensors."""
    attempts: int
    timings: Timings
    """Of the last attempt."""
    total_s: float
    servers: tuple[ServerGap, ...]
    bound: float
    """Largest mean gap that passes, nats."""

    @property
    def fixed(self) -> ProbeGap:
        """Over all servers: the prefill path, temperature 1."""
        return combined([server.fixed for server in self.servers])

    @property
    def sampled(self) -> ProbeGap:
        """Over all servers: the path of decoding and sampling; the gap of fresh tokens (invariant 8)."""
        return combined([server.sampled for server in self.servers])

    @property
    def long(self) -> ProbeGap:
        """Over all servers: the long sequence; no tokens where this publication had none."""
        return combined([server.long for server in self.servers])

    @property
    def mean_gap(self) -> float:
        """Of the worst part of the worst server; what the bound is compared with."""
        return max(server.mean for server in self.servers)

    def finished(self, total_s: float) -> Self:
        return replace(self, total_s=total_s)

    def metrics(self) -> Metrics:
        timings, fixed, sampled, long = self.timings, self.fixed, self.sampled, self.long
        of_long = {
            "probe/long_gap_mean_nats": long.mean,
            "probe/long_gap_max_nats": long.max,
            "probe/long_tokens": float(long.num_tokens),
        }
        return {
            "weights/publication_s": self.total_s,
            "weights/servers": float(len(self.servers)),
            "weights/session_s": timings.session_s,
            "weights/stage_s": timings.stage_s,
            "weights/gather_s": timings.gather_s,
            "weights/wire_s": timings.wire_s,
            "weights/commit_s": timings.commit_s,
            "weights/pause_s": timings.pause_s,
            "weights/load_s": timings.load_s,
            "weights/resume_s": timings.resume_s,
            "weights/probe_s": timings.probe_s,
            "weights/score_s": timings.score_s,
            "weights/sent_bytes": float(self.num_bytes),
            "weights/full_bytes": float(self.full_bytes),
            "weights/attempts": float(self.attempts),
            "probe/fixed_gap_mean_nats": fixed.mean,
            "probe/fixed_gap_max_nats": fixed.max,
            "probe/fixed_tokens": float(fixed.num_tokens),
            "probe/fresh_gap_mean_nats": sampled.mean,
            "probe/fresh_gap_max_nats": sampled.max,
            "probe/fresh_tokens": float(sampled.num_tokens),
            "probe/bound_nats": self.bound,
        } | (of_long if long.num_tokens else {})


def bound_from(floor: float, dtype: Dtype) -> float:
    """The bound that the gap of the first publication sets; one that the floor itself fails where it is too high."""
    if floor > LARGEST_FLOOR[dtype]:
        return LARGEST_FLOOR[dtype]
    return max(FLOOR_FACTOR * floor, SMALLEST_BOUND)
