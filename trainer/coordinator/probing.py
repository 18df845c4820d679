"""The probe of a publication: what is scored, by whom, and the gap between engine and trainer (invariant 8).

Two halves. *Fixed* sequences take the engine's prefill path and are scored at temperature 1, which is all that an
engine's prompt log-probs can do; now and then one as long as a run's longest is among them. *Sampled* continuations
take the path of decoding and sampling with the training sampling parameters, and are scored at the sampling
temperature.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from asyppo_async.errors import WeightSyncError
from asyppo_async.rpc.calls import ProbeReport
from asyppo_async.trainer.worker.messages import ActorForward, ActorForwardResult
from asyppo_async.types import Float32Array, Int32Array, Response, SamplingParams, concatenate_sequences
from asyppo_async.weights.probe import NOT_PROBED, ProbeGap, compare, fixed_sequences, long_sequence

KV_BLOCK_TOKENS = 128
"""Of the CPU engine, and a multiple of every smaller block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePlan:
    """The same for every publication of a run, so that their gaps can be compared."""

    fixed: tuple[Int32Array, ...]
    """Of every publication."""
    long: tuple[Int32Array, ...]
    """Of some: one sequence, or none where the fixed ones are as long as any of the run."""
    prompts: tuple[Int32Array, ...]
    sampling: SamplingParams

    def scored(self, *, with_long: bool) -> tuple[Int32Array, ...]:
        """What engine and actor score at temperature 1; the long one comes last."""
        return (*self.fixed, *self.long) if with_long else self.fixed

    def fixed_request(self, *, with_long: bool) -> ActorForward:
        pairs = [(sequence[:1], sequence[1:]) for sequence in self.scored(with_long=with_long)]
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
    long: ProbeGap = NOT_PROBED
    """Of the long sequence alone: among the fixed ones its many tokens would hide theirs."""

    @property
    def mean(self) -> float:
        """Of the worst part."""
        return max(self.fixed.mean, self.sampled.mean, self.long.mean)

    def words(self, bound: float) -> str:
        """What a person is told where this is beyond the bound."""
        return (
            f"server {self.address}: engine and trainer differ by {self.mean:.3g} nats on average (prefill "
            f"{self.fixed.mean:.3g}, sampled {self.sampled.mean:.3g}, long {self.long.mean:.3g}, worst token "
            f"{max(self.fixed.max, self.sampled.max, self.long.max):.3g}), the bound is {bound:.3g}"
        )


class LongTurns:
    """Whose turn the long sequence is: every publication to somebody new, and one of every so many."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._epoch = 0
        """Of the session in which it was scored last."""
        self._since = 0
        """Publications that have passed since then."""

    def is_due(self, epoch: int) -> bool:
        return epoch != self._epoch or 0 < self._every <= self._since + 1

    def passed(self, epoch: int) -> None:
        """The publication that `is_due` was asked for has passed its probe."""
        self._since = 0 if self.is_due(epoch) else self._since + 1
        self._epoch = epoch


def plan_probe(
    *,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    vocab_size: int,
    max_model_len: int,
    longest_tokens: int,
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
        longest_tokens: Of prompt and response in this run, which the actor has room for.
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
    # An engine's prompt log-probs come with at least one generated token, which needs a place.
    fixed = tuple(fixed_sequences(seed, vocab_size, KV_BLOCK_TOKENS, max_model_len - 1))
    long_tokens = min(longest_tokens, max_model_len) - 1
    return ProbePlan(
        fixed=fixed,
        long=(long_sequence(seed, vocab_size, long_tokens),) if long_tokens > len(fixed[-1]) else (),
        prompts=tuple(np.asarray(prompt, dtype=np.int32) for prompt in repeated),
        sampling=replace(sampling, min_tokens=0, max_tokens=min(num_tokens, room)),
    )


def check_fresh(address: str, version: int, report: ProbeReport) -> None:
    """Refuse continuations that other weights than those on probation have sampled."""
    for response in report.sampled:
        if not response.versions.oldest == response.versions.newest == version:
            raise WeightSyncError(
                f"server {address}, probe of version {version}: a continuation was sampled by versions "
                f"{sorted({sampled for sampled, _ in response.versions.runs})}"
            )


def gaps_of(
    addresses: Sequence[str],
    reports: Sequence[ProbeReport],
    fixed: ActorForwardResult,
    sampled: ActorForwardResult,
    num_fixed: int,
) -> list[ServerGap]:
    """Compare every server with the actor's scores of the same tokens.

    Args:
        addresses: Of the reports.
        reports: The first `num_fixed` sequences of each are those of every publication.
        fixed: The actor's scores of the sequences, [N], whether or not each report has the long one.
        sampled: The actor's scores of the continuations, report after report.
        num_fixed: How many sequences every publication has.
    """
    gaps = []
    start = 0
    for address, report in zip(addresses, reports, strict=True):
        engine = _behaviour_logprobs(report.sampled)
        trainer = sampled.logprobs[start : start + len(engine)]
        start += len(engine)
        # At the edge of the kept set the two may disagree on a token's membership: that is no gap of weights.
        inside = ~np.isneginf(trainer)
        short = np.concatenate(report.fixed_logprobs[:num_fixed])
        long = report.fixed_logprobs[num_fixed:]
        gaps.append(
            ServerGap(
                address=address,
                fixed=compare(short, fixed.logprobs[: len(short)]),
                sampled=compare(engine[inside], trainer[inside]),
                long=compare(np.concatenate(long), fixed.logprobs[len(short) :]) if long else NOT_PROBED,
            )
        )
    return gaps


def worst_of(gaps: Sequence[ServerGap]) -> list[ServerGap]:
    """For each server the largest of its own, part by part; servers in the order in which they come first."""
    worst: dict[str, ServerGap] = {}
    for gap in gaps:
        known = worst.get(gap.address, gap)
        worst[gap.address] = ServerGap(
            address=gap.address,
            fixed=_larger(known.fixed, gap.fixed),
            sampled=_larger(known.sampled, gap.sampled),
            long=_larger(known.long, gap.long),
        )
    return list(worst.values())


def combined(gaps: Sequence[ProbeGap]) -> ProbeGap:
    """One gap over the tokens of all."""
    num_tokens = sum(gap.num_tokens for gap in gaps)
    total = math.fsum(gap.mean * gap.num_tokens for gap in gaps) if num_tokens else 0.0
    return ProbeGap(
        mean=total / num_tokens if num_tokens else 0.0,
        max=max((gap.max for gap in gaps), default=0.0),
        num_tokens=num_tokens,
    )


def _larger(one: ProbeGap, other: ProbeGap) -> ProbeGap:
    return max(one, other, key=lambda gap: (gap.mean, gap.num_tokens))


def _behaviour_logprobs(responses: Sequence[Response]) -> Float32Array:
    return np.concatenate([response.behaviour_logprobs for response in responses])
