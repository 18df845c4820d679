"""What a step measured, as one flat row of `area/name_unit` numbers (`algorithms.md` section 10)."""

import numpy as np
import torch

from asyppo_async.algorithms.metrics import (
    StalenessStatistics,
    explained_variance_sums,
    ratio_statistics,
    staleness_statistics,
    value_std_quantiles,
)
from asyppo_async.algorithms.token_classes import TokenClassCounts, count_classes
from asyppo_async.metrics import Metrics, mean_of, merge
from asyppo_async.trainer.coordinator.draws import TokenUse
from asyppo_async.trainer.coordinator.step import StepResult
from asyppo_async.trainer.coordinator.trace import Trace
from asyppo_async.trainer.worker.messages import TrainResult

PHASES = ("actor_forward", "actor_train", "critic_forward", "critic_train", "arithmetic")


def staleness_of(result: StepResult) -> StalenessStatistics:
    """Age of the batch of a step."""
    batch = result.batch
    return staleness_statistics(
        torch.from_numpy(batch.versions), torch.from_numpy(batch.lengths), trainer_version=batch.step
    )


def token_use(result: StepResult) -> TokenUse:
    """What became of the batch's tokens, for the waste ledger.

    A step without an optimizer step trains on nothing, but its tokens were not rejected for that. Tokens of filtered
    groups that stay in the batch for the critics count as rejected.
    """
    counts = count_classes(result.decisions.classes)
    return TokenUse(
        trained=counts.trained,
        stale=counts.stale,
        rejected=counts.rejected_token + counts.rejected_sequence + counts.filtered,
    )


def step_metrics(result: StepResult, trace: Trace) -> Metrics:
    """Everything but what the loop around the step measured (waits, publication)."""
    counts = count_classes(result.decisions.classes)
    parts = [
        _batch_metrics(result),
        _staleness_metrics(staleness_of(result)),
        _token_metrics(counts),
        _mismatch_metrics(result),
        _critic_metrics(result),
        _advantage_metrics(result),
        {f"time/{phase}_s": trace.seconds(phase) for phase in PHASES},
    ]
    parts += [_update_metrics(f"critic_{index}", update) for index, update in enumerate(result.critics)]
    if result.actor is not None:
        parts.append(_update_metrics("actor", result.actor))
    return merge(parts)


def _batch_metrics(result: StepResult) -> Metrics:
    rewards, lengths = result.batch.rewards, result.batch.lengths
    stopped = [
        trajectory.response.finish_reason == "stop"
        for group in result.batch.groups
        for trajectory in group.trajectories
    ]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/accuracy": float((rewards >= 1).mean()),
        "reward/groups_all_equal": mean_of(
            float(len({trajectory.reward for trajectory in group.trajectories}) == 1)
            for group in result.batch.groups
        ),
        "response/length_mean_tokens": float(lengths.mean()),
        "response/length_p95_tokens": float(np.quantile(lengths, 0.95)),
        "response/stopped_share": mean_of(map(float, stopped)),
        "batch/groups": float(len(result.batch.groups)),
        "batch/responses": float(len(lengths)),
        "batch/tokens": float(lengths.sum()),
    }


def _staleness_metrics(staleness: StalenessStatistics) -> Metrics:
    return {
        "staleness/mean": staleness.mean,
        "staleness/max": float(staleness.maximum),
        "staleness/mixed_version_share": staleness.mixed_share,
    }


def _token_metrics(counts: TokenClassCounts) -> Metrics:
    return {
        "tokens/trained": float(counts.trained),
        "tokens/stale": float(counts.stale),
        "tokens/rejected": float(counts.rejected_token + counts.rejected_sequence),
        "tokens/filtered": float(counts.filtered),
    }


def _mismatch_metrics(result: StepResult) -> Metrics:
    mismatch = result.mismatch
    ratios = ratio_statistics(mismatch.log_ratio, mismatch.measured)
    age = torch.from_numpy(result.batch.step - result.batch.versions)
    gaps = mismatch.log_ratio.abs()
    row = {
        "mismatch/ratio_mean": ratios.mean,
        "mismatch/ratio_max": ratios.maximum,
        "mismatch/ratio_min": ratios.minimum,
        "mismatch/kl_k3": ratios.kl_k3,
        "mismatch/below_share": mismatch.counts.num_below / max(1, mismatch.counts.num_tokens),
        "mismatch/above_share": mismatch.counts.num_above / max(1, mismatch.counts.num_tokens),
        "mismatch/non_finite_tokens": float(mismatch.counts.num_non_finite),
        "mismatch/outside_kept_share": float(np.isneginf(result.proximal_logprobs).mean()),
        "mismatch/rejected_responses": float(mismatch.counts.num_rejected_sequences),
    }
    for staleness in range(int(age.max()) + 1):
        chosen = mismatch.measured & (age == staleness)
        if bool(chosen.any()):
            row[f"mismatch/gap_mean_staleness_{staleness}"] = float(gaps[chosen].mean())
    return row


def _critic_metrics(result: StepResult) -> Metrics:
    returns = torch.repeat_interleave(
        torch.from_numpy(result.batch.rewards), torch.from_numpy(result.batch.lengths)
    )
    row: Metrics = {}
    for name, values in (("before", result.values_before), ("used", result.values)):
        if values is None:
            continue
        sums = [explained_variance_sums(returns, torch.from_numpy(own)) for own in values]
        row |= {
            f"critic_{index}/explained_variance_{name}": own.explained_variance
            for index, own in enumerate(sums)
        }
        row |= {f"critic_{index}/bias_{name}": own.bias for index, own in enumerate(sums)}
    if not len(result.values):
        return row
    quantiles = value_std_quantiles(result.decisions.value_std)
    row |= {
        f"value_std/p{percent}": value for percent, value in zip((10, 20, 50, 80, 90), quantiles, strict=True)
    }
    num_tokens = max(1, len(returns))
    row["value_std/advantage_masked_share"] = result.decisions.std_masks.num_advantage_masked / num_tokens
    row["value_std/entropy_filtered_share"] = result.decisions.std_masks.num_entropy_filtered / num_tokens
    row["value_std/degenerate"] = float(result.decisions.std_masks.degenerate)
    return row


def _advantage_metrics(result: StepResult) -> Metrics:
    advantages = result.decisions.advantages
    return {
        "advantage/mean": float(advantages.mean()),
        "advantage/std": float(advantages.std(correction=0)),
    }


def _update_metrics(name: str, update: TrainResult) -> Metrics:
    taken = [step for step in update.steps if not step.skipped]
    row = {
        f"{name}/loss": mean_of(step.loss for step in taken),
        f"{name}/grad_norm": mean_of(step.grad_norm for step in taken),
        f"{name}/learning_rate": taken[-1].learning_rate if taken else float("nan"),
        f"{name}/optimizer_steps": float(len(taken)),
        f"{name}/skipped_steps": float(len(update.steps) - len(taken)),
    }
    if name == "actor":
        row |= {
            "actor/entropy": mean_of(step.entropy for step in taken),
            "actor/clip_fraction_low": mean_of(step.clip_fraction_low for step in taken),
            "actor/clip_fraction_high": mean_of(step.clip_fraction_high for step in taken),
            "actor/clip_fraction_last": taken[-1].clip_fraction_low + taken[-1].clip_fraction_high
            if taken
            else float("nan"),
            "actor/ratio_mean": mean_of(step.ratio_mean for step in taken),
            "actor/ratio_max": max((step.ratio_max for step in taken), default=float("nan")),
            "actor/kl_proximal": mean_of(step.kl_proximal for step in taken),
        }
    return row
