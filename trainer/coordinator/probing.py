"""The probe of a publication: what is scored, by whom, and the gap between engine and trainer (invariant 8).

Two halves. *Fixed* sequences take the engine's prefill path and are scored at temperature 1, which is all that an
engine's prompt log-probs can do. *Sampled* continuations take the path of decoding and sampling with the training
sampling parameters, and are scored at the sampling temperature.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from asyppo_async.errors import WeightSyncError
from asyppo_async.rpc.calls import ProbeReport
from asyppo_async.trainer.worker.messages import ActorForward, ActorForwardResult
from asyppo_async.types import Float32Array, Int32Array, Response, SamplingParams, concatenate_sequences
from asyppo_async.weights.probe import ProbeGap, compare, fixed_sequences

KV_BLOCK_TOKENS = 128
"""Of the CPU engine, and a multiple of every smaller block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePlan:
    """The same for every publication of a run, so that their gaps can be compared."""

    fixed: tuple[Int32Array, ...]
    prompts: tuple[Int32Array, ...]
    sampling: SamplingParams

    def fixed_request(self) -> ActorForward:
        pairs = [(sequence[:1], sequence[1:]) for sequence in self.fixed]
        return ActorForward(sequences=concatenate_sequences(pairs), temperature=1.0)

    def sampled_request(self, reports: Sequence[ProbeReport]) -> ActorForward:
        """The continuations of all servers, server after server."""
        pairs = [
            (prompt, response.token_ids)
            for report in reports
            for prompt, response in zip(self.prompts, report.sampled, strict=True)
        ]
        return ActorForward(
            sequences=concatenate_sequences(pairs),
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerGap:
    """What one server's probe measured."""

    address: str
    fixed: ProbeGap
    sampled: ProbeGap

    @property
    def mean(self) -> float:
        """Of the worse half."""
        return max(self.fixed.mean, self.sampled.mean)


def plan_probe(
    *,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    vocab_size: int,
    max_model_len: int,
    num_sequences: int,
    num_tokens: int,
    seed: int,
) -> ProbePlan:
    """Fixed sequences from the seed, and continuations of the shortest of the given prompts.

    Args:
        prompts: Of the task.
        sampling: Of the training rollouts.
        vocab_size: Of the model.
        max_model_len: Shortest of the fleet.
        num_sequences: Continuations.
        num_tokens: Longest continuation.
        seed: Of the fixed sequences.

    Raises:
        WeightSyncError: no prompt leaves room for a continuation.
    """
    chosen = sorted(prompts, key=len)[:num_sequences]
    room = max_model_len - max((len(prompt) for prompt in chosen), default=max_model_len)
    if room < 1:
        raise WeightSyncError(f"no prompt of the task leaves room for a probe within {max_model_len} tokens")
    # Prompts repeat where the task has fewer: each continuation is sampled on its own.
    repeated = [chosen[index % len(chosen)] for index in range(num_sequences)]
    return ProbePlan(
        # An engine's prompt log-probs come with at least one generated token, which needs a place.
        fixed=tuple(fixed_sequences(seed, vocab_size, KV_BLOCK_TOKENS, max_model_len - 1)),
        prompts=tuple(np.asarray(prompt, dtype=np.int32) for prompt in repeated),
        sampling=replace(sampling, min_tokens=0, max_tokens=min(num_tokens, room)),
    )


def check_fresh(address: str, version: int, report: ProbeReport) -> None:
    """Refuse continuations that other weights than those on probation have sampled."""
    for response in report.sampled:
        if bool((response.versions != version).any()):
            raise WeightSyncError(
                f"server {address}, probe of version {version}: a continuation was sampled by versions "
                f"{np.unique(response.versions).tolist()}"
            )


def gaps_of(
    addresses: Sequence[str],
    reports: Sequence[ProbeReport],
    fixed: ActorForwardResult,
    sampled: ActorForwardResult,
) -> list[ServerGap]:
    """Compare every server with the actor's scores of the same tokens."""
    gaps = []
    start = 0
    for address, report in zip(addresses, reports, strict=True):
        engine = _behaviour_logprobs(report.sampled)
        trainer = sampled.logprobs[start : start + len(engine)]
        start += len(engine)
        # At the edge of the kept set the two may disagree on a token's membership: that is no gap of weights.
        inside = ~np.isneginf(trainer)
        gaps.append(
            ServerGap(
                address=address,
                fixed=compare(np.concatenate(report.fixed_logprobs), fixed.logprobs),
                sampled=compare(engine[inside], trainer[inside]),
            )
        )
    return gaps


def combined(gaps: Sequence[ProbeGap]) -> ProbeGap:
    """One gap over the tokens of all."""
    num_tokens = sum(gap.num_tokens for gap in gaps)
    total = math.fsum(gap.mean * gap.num_tokens for gap in gaps) if num_tokens else 0.0
    return ProbeGap(
        mean=total / num_tokens if num_tokens else 0.0,
        max=max((gap.max for gap in gaps), default=0.0),
        num_tokens=num_tokens,
    )


def _behaviour_logprobs(responses: Sequence[Response]) -> Float32Array:
    return np.concatenate([response.behaviour_logprobs for response in responses])
