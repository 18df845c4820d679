"""Tokens of a batch: their classes and ages, the mismatch between engine and trainer by age and cause, advantages."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from asyppo_async.algorithms.breakdowns import masked_correlation, rejection_shares
from asyppo_async.algorithms.calibration import mean_by_position, share_by_length
from asyppo_async.algorithms.metrics import (
    StalenessStatistics,
    ratio_statistics,
    staleness_statistics,
)
from asyppo_async.algorithms.mismatch import SequenceGate, SequenceGateKind, apply_sequence_gate
from asyppo_async.algorithms.packed import count_true, segment_starts, spread, unless_all
from asyppo_async.algorithms.token_classes import TokenClassCounts
from asyppo_async.metrics import Metrics, known
from asyppo_async.trainer.coordinator.estimators import actor_lambda
from asyppo_async.trainer.coordinator.measures.lengths import LENGTH_EDGES_TOKENS, filled_buckets
from asyppo_async.trainer.coordinator.step import StepResult

NUM_DECILES = 10
VETO_SPACES: Mapping[SequenceGateKind, str] = {"max_log_ratio": "log", "max_ratio": "ratio"}
"""The two readings of MIS: which one decides is a choice, what the other would reject is told beside it."""


def staleness_of(result: StepResult) -> StalenessStatistics:
    """Age of the batch of a step."""
    batch = result.batch
    return staleness_statistics(
        torch.from_numpy(batch.versions), torch.from_numpy(batch.lengths), trainer_version=batch.step
    )


def staleness_metrics(staleness: StalenessStatistics) -> Metrics:
    """Mean, maximum and mixture; the histograms are in the row as lists."""
    return {
        "staleness/mean": staleness.mean,
        "staleness/max": float(staleness.maximum),
        "staleness/mixed_version_share": staleness.mixed_share,
    }


def class_metrics(counts: TokenClassCounts) -> Metrics:
    """Tokens by class."""
    return {
        "tokens/trained": float(counts.trained),
        "tokens/stale": float(counts.stale),
        "tokens/rejected": float(counts.rejected_token + counts.rejected_sequence),
        "tokens/filtered": float(counts.filtered),
    }


def mismatch_metrics(result: StepResult) -> Metrics:
    """Before rejection, over all tokens and over fresh and older ones apart, and what was rejected for which reason."""
    mismatch, counts = result.mismatch, result.mismatch.counts
    age = torch.from_numpy(result.batch.step - result.batch.versions)
    measured = mismatch.measured & result.decisions.masks.measured
    row = _ratios_by_age(mismatch.log_ratio, measured, age)
    row |= {
        "mismatch/below_share": counts.num_below / max(1, counts.num_tokens),
        "mismatch/above_share": counts.num_above / max(1, counts.num_tokens),
        "mismatch/non_finite_tokens": float(counts.num_non_finite),
        "mismatch/outside_kept_share": float(np.isneginf(result.proximal_logprobs).mean()),
    }
    gaps = mismatch.log_ratio.abs()
    for staleness in range(int(age.max()) + 1):
        chosen = measured & (age == staleness)
        if number := count_true(chosen):
            of_age = gaps if number == len(gaps) else gaps[chosen]
            row[f"mismatch/gap_mean_staleness_{staleness}"] = float(of_age.mean())
    return row | _rejections(result, measured, age)


def advantage_metrics(result: StepResult) -> Metrics:
    """Mean, spread, and how they lie along the response, without filtered groups; the lambda they were made with."""
    advantages, counted = result.decisions.advantages, result.decisions.masks.advantage
    chosen = advantages if unless_all(counted) is None else advantages[counted]
    lengths = torch.from_numpy(result.batch.lengths)
    index = torch.arange(len(advantages)) - spread(segment_starts(lengths), lengths)
    position = (index / spread(lengths, lengths)).float()
    row = {
        "advantage/mean": float(chosen.mean()),
        "advantage/std": float(chosen.std(correction=0)),
        "advantage/correlation_with_position": masked_correlation(position, advantages, counted),
    }
    if result.algorithm.estimator == "gae":
        lambdas = actor_lambda(lengths, result.algorithm)
        row |= {
            "advantage/lambda_min": float(lambdas.min()),
            "advantage/lambda_mean": float(lambdas.mean()),
            "advantage/lambda_max": float(lambdas.max()),
        }
    return known(row)


def advantages_by_position(result: StepResult) -> list[float]:
    """Mean |A| in each tenth of a response; NaN where all responses are shorter."""
    lengths = torch.from_numpy(result.batch.lengths)
    return list(
        mean_by_position(
            result.decisions.advantages.abs(),
            lengths,
            num_parts=NUM_DECILES,
            valid=unless_all(result.decisions.masks.advantage),
        )
    )


def _ratios_by_age(log_ratio: Tensor, measured: Tensor, age: Tensor) -> Metrics:
    row = _ratios("mismatch", log_ratio, measured)
    num_measured = count_true(measured)
    for name, among in (("mismatch_fresh", measured & (age == 0)), ("mismatch_older", measured & (age > 0))):
        number = count_true(among)
        if number == num_measured:
            row |= {key.replace("mismatch", name): value for key, value in row.items()}
        elif number:
            row |= _ratios(name, log_ratio, among)
    return row


def _ratios(name: str, log_ratio: Tensor, among: Tensor) -> Metrics:
    ratios = ratio_statistics(log_ratio, among)
    return {
        f"{name}/ratio_mean": ratios.mean,
        f"{name}/ratio_min": ratios.minimum,
        f"{name}/ratio_p1": ratios.p1,
        f"{name}/ratio_p99": ratios.p99,
        f"{name}/ratio_max": ratios.maximum,
        f"{name}/effective_sample_size": ratios.effective_sample_size,
        f"{name}/chi_square": ratios.chi_square,
        f"{name}/kl_k1": ratios.kl_k1,
        f"{name}/kl_k3": ratios.kl_k3,
        f"{name}/perplexity_ratio": ratios.perplexity_ratio,
    }


def _rejections(result: StepResult, measured: Tensor, age: Tensor) -> Metrics:
    mismatch, counts = result.mismatch, result.mismatch.counts
    rejected = ~mismatch.keep_sequences
    num_rejected = count_true(rejected)
    row = {"mismatch/rejected_responses": float(num_rejected)}
    for gate, number in zip(result.algorithm.sequence_gates, counts.rejected_by_gate, strict=True):
        row[f"mismatch/rejected_by_{gate.kind}_responses"] = float(number)
    if result.algorithm.opsm_threshold is not None:
        # It judges after the gates; what they reject is theirs.
        row["mismatch/rejected_by_opsm_responses"] = float(num_rejected - counts.num_rejected_sequences)
    lengths = torch.from_numpy(result.batch.lengths)
    by_length = share_by_length(rejected, lengths, LENGTH_EDGES_TOKENS)
    for index, bucket in filled_buckets(lengths):
        row[f"mismatch/rejected_responses_share_{bucket}"] = by_length[index]
    row |= _vetoes(result, lengths)
    shares = rejection_shares(
        measured & ~(mismatch.keep_tokens & spread(mismatch.keep_sequences, lengths)),
        result.decisions.advantages,
        age,
        measured,
    )
    return row | known(
        {
            "mismatch/rejected_share_positive": shares.positive_advantage,
            "mismatch/rejected_share_negative": shares.negative_advantage,
            "mismatch/rejected_share_fresh": shares.fresh,
            "mismatch/rejected_share_older": shares.stale,
            "mismatch/rejected_share_older_negative": shares.stale_negative,
        }
    )


def _vetoes(result: StepResult, lengths: Tensor) -> Metrics:
    """Share of responses that a bound on the largest ratio rejects, in both spaces, by length; nothing without such a
    gate.

    In ratio space a long response is at risk: one token in 100,000 beyond the bound vetoes a quarter of the responses
    of 30,000 tokens.
    """
    bounds = [gate.high for gate in result.algorithm.sequence_gates if gate.kind in VETO_SPACES]
    row: Metrics = {}
    for kind, space in VETO_SPACES.items() if bounds else ():
        kept = apply_sequence_gate(
            result.mismatch.log_ratio,
            lengths,
            SequenceGate(kind=kind, high=bounds[0]),
            measured=result.mismatch.measured,
        )
        by_length = share_by_length(~kept, lengths, LENGTH_EDGES_TOKENS)
        row |= {
            f"mismatch/veto_share_{space}_{bucket}": by_length[index]
            for index, bucket in filled_buckets(lengths)
        }
    return row
