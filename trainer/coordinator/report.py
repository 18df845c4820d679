"""What a step measured, as one flat row of `area/name_unit` numbers (`algorithms.md` section 10)."""

import numpy as np

from asyppo_async.algorithms.token_classes import count_classes
from asyppo_async.metrics import Metrics, mean_of, merge
from asyppo_async.trainer.coordinator.draws import LedgerCounts, TokenCounts, TokenUse
from asyppo_async.trainer.coordinator.measures.critics import calibration_of, critic_metrics
from asyppo_async.trainer.coordinator.measures.tokens import (
    advantage_metrics,
    advantages_by_position,
    class_metrics,
    mismatch_metrics,
    staleness_metrics,
    staleness_of,
)
from asyppo_async.trainer.coordinator.measures.updates import clip_series, update_metrics
from asyppo_async.trainer.coordinator.step import StepResult
from asyppo_async.trainer.coordinator.trace import Trace

PHASES = ("actor_forward", "actor_train", "critic_forward", "critic_train", "critic_scoring", "arithmetic")


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
        staleness_metrics(staleness_of(result)),
        class_metrics(counts),
        mismatch_metrics(result),
        critic_metrics(result),
        advantage_metrics(result),
        _reference_metrics(result),
        {f"time/{phase}_s": trace.seconds(phase) for phase in PHASES},
    ]
    parts += [
        update_metrics(f"critic_{index}", update, clip_norm=result.critic_clip_norm)
        for index, update in enumerate(result.critics)
    ]
    if result.actor is not None:
        parts.append(update_metrics("actor", result.actor, clip_norm=result.actor_clip_norm))
    return merge(parts)


def step_histograms(result: StepResult) -> dict[str, list[float]]:
    """What of a step is a series of numbers."""
    staleness = staleness_of(result)
    return {
        "staleness_histogram_tokens": list(map(float, staleness.token_histogram)),
        "staleness_histogram_responses": list(map(float, staleness.sequence_histogram)),
        "advantage_absolute_by_decile": advantages_by_position(result),
        **calibration_of(result),
        **({} if result.actor is None else clip_series(result.actor)),
    }


def ledger_metrics(counts: LedgerCounts, tokens: TokenCounts) -> Metrics:
    """Draws and tokens since the start of the run, what was lost by reason."""
    row = {
        "ledger/considered": float(counts.considered),
        "ledger/skipped": float(counts.skipped),
        "ledger/issued": float(counts.issued),
        "ledger/trained": float(counts.trained),
        "ledger/dropped": float(counts.dropped),
        "ledger/filtered": float(counts.filtered),
        "ledger/reduced": float(counts.reduced),
        "ledger/late_messages": float(counts.late_messages),
        "waste/tokens_generated": float(tokens.generated),
        "waste/tokens_trained": float(tokens.trained),
        "waste/tokens_stale": float(tokens.stale),
        "waste/tokens_rejected": float(tokens.rejected),
        "waste/tokens_filtered": float(tokens.filtered),
    }
    for kind, reasons in (
        ("ledger/dropped", counts.dropped_by_reason),
        ("ledger/filtered", counts.filtered_by_reason),
        ("ledger/returned", counts.returned_by_reason),
        ("waste/tokens_dropped", tokens.dropped_by_reason),
    ):
        row |= {f"{kind}_{reason}": float(number) for reason, number in reasons.items()}
    return row


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
        **_rewards_by_task(result),
        "batch/groups": float(len(result.batch.groups)),
        "batch/responses": float(len(lengths)),
        "batch/tokens": float(lengths.sum()),
    }


def _rewards_by_task(result: StepResult) -> Metrics:
    """Mean reward of each task of a mix; nothing where a step has one task only."""
    by_task: dict[str, list[float]] = {}
    for group in result.batch.groups:
        by_task.setdefault(group.prompt.task, []).extend(t.reward for t in group.trajectories)
    if len(by_task) == 1:
        return {}
    return {f"reward/mean_{task}": mean_of(rewards) for task, rewards in sorted(by_task.items())}


def _reference_metrics(result: StepResult) -> Metrics:
    """How far the policy was from the frozen reference when the step began, per token that both can sample."""
    if result.reference_logprobs is None:
        return {}
    difference = result.reference_logprobs.astype(np.float64) - result.proximal_logprobs
    known = difference[np.isfinite(difference)]
    return {
        "reference/kl_k1": float(-known.mean()) if len(known) else float("nan"),
        "reference/kl_k3": float((np.expm1(known) - known).mean()) if len(known) else float("nan"),
    }
