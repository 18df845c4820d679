"""How wrong one policy gradient is when the engine computes in another precision, with and without a correction.

The true gradient is that of the trainer's policy. On responses of the engine it is estimated without bias by the
product of all ratios of a response; every method is compared with it *on the same responses*, so that sampling noise is
common to both, and the noise of one batch stands beside it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from asyppo_async.algorithms.group_advantages import dr_grpo
from asyppo_async.algorithms.mismatch import SequenceGate, TokenRule, correct_mismatch, ratio
from asyppo_async.algorithms.packed import segment_sum, spread
from asyppo_async.trainer.worker.model import Policy
from benchmarks.trends.learning import BFLOAT16, FLOAT8_WEIGHTS, Engine
from benchmarks.trends.measuring import SAMPLES, at_stages, sample_all
from benchmarks.trends.studies import STUDIES
from benchmarks.trends.task import NUM_TOKENS

STAGES = (0, 30, 80)
"""Training steps of the policy that is looked at."""
BATCH_RESPONSES = 64
MIS = (SequenceGate(kind="max_log_ratio", high=5.0),)
RULES: dict[str, tuple[TokenRule, tuple[SequenceGate, ...]]] = {
    "no correction": (TokenRule(kind="none"), ()),
    "IcePoP mask": (TokenRule(kind="icepop_mask", low=0.5, high=5.0), ()),
    "IcePoP weight": (TokenRule(kind="icepop", low=0.5, high=5.0), ()),
    "IcePoP mask + MIS": (TokenRule(kind="icepop_mask", low=0.5, high=5.0), MIS),
    "TIS 2": (TokenRule(kind="truncate", high=2.0), ()),
}


def gradient_errors(seed: int) -> list[dict[str, float | str]]:
    """For each stage, engine and method: |g - g*| / |g*|, and what the ratios were."""
    arm = next(arm for arm in STUDIES["staleness"].arms if arm.name == "float32")
    rows: list[dict[str, float | str]] = []
    for stage, run in at_stages(arm, seed, STAGES):
        for engine in (BFLOAT16, FLOAT8_WEIGHTS):
            rows += [{"stage": stage, **row} for row in _at(run.policy, engine, seed)]
    return rows


def _at(policy: Policy, engine: Engine, seed: int) -> list[dict[str, float | str]]:
    sampled = sample_all(policy, engine, seed)
    logprobs = sampled.distribution(policy).logprobs
    advantages = spread(dr_grpo(sampled.rewards, sampled.group_ids), sampled.lengths)
    parameters = list(policy.module.parameters())

    def gradient(coefficients: Tensor) -> Tensor:
        grads = torch.autograd.grad((coefficients * logprobs).mean(), parameters, retain_graph=True)
        return torch.cat([grad.flatten() for grad in grads])

    plain = correct_mismatch(
        logprobs, sampled.behaviour_logprobs, sampled.lengths, rule=TokenRule(kind="none")
    )
    of_responses = spread(ratio(segment_sum(plain.log_ratio, sampled.lengths)), sampled.lengths)
    truth = gradient(of_responses * advantages)
    noise = _noise_of_a_batch(gradient, of_responses * advantages, truth)
    rows: list[dict[str, float | str]] = []
    for name, (rule, gates) in RULES.items():
        fixed = correct_mismatch(
            logprobs, sampled.behaviour_logprobs, sampled.lengths, rule=rule, gates=gates
        )
        weights = fixed.weights * spread(fixed.keep_sequences.float(), sampled.lengths)
        rows.append(
            {
                "engine": engine.name,
                "method": name,
                "error": _relative(gradient(weights * advantages), truth),
                "batch_noise": noise,
                "rejected_tokens": fixed.counts.num_rejected_tokens,
                "rejected_responses": fixed.counts.num_rejected_sequences,
                "largest_log_ratio": float(plain.log_ratio.abs().max()),
                "mean_log_ratio": float(plain.log_ratio.abs().mean()),
            }
        )
    return rows


def _noise_of_a_batch(gradient: Callable[[Tensor], Tensor], coefficients: Tensor, truth: Tensor) -> float:
    """Mean relative error of the same gradient from one batch of whole groups, against all responses."""
    num_tokens = BATCH_RESPONSES // SAMPLES * SAMPLES * NUM_TOKENS
    num_batches = len(coefficients) // num_tokens
    errors = []
    for batch in range(0, num_batches, num_batches // 4):
        chosen = torch.zeros_like(coefficients)
        chosen[batch * num_tokens : (batch + 1) * num_tokens] = num_batches
        errors.append(_relative(gradient(chosen * coefficients), truth))
    return sum(errors) / len(errors)


def _relative(one: Tensor, truth: Tensor) -> float:
    return float((one - truth).norm() / truth.norm())
