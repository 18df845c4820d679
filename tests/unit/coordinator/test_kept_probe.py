"""The probe under a truncated behaviour: both sides score over the kept set, and its edge is no gap of weights."""

import numpy as np
import pytest

from asyppo_async.rpc.calls import ProbeReport
from asyppo_async.trainer.coordinator.probing import combined, gaps_of, plan_probe
from asyppo_async.trainer.worker.messages import ActorForwardResult
from asyppo_async.types import Response, SamplingParams, VersionRuns

SAMPLING = SamplingParams(
    temperature=0.99, top_p=0.99, top_k=100, min_tokens=0, max_tokens=8, stop_token_ids=(1,)
)


def report_of(logprobs: list[float]) -> ProbeReport:
    response = Response(
        token_ids=np.arange(3, dtype=np.int32),
        behaviour_logprobs=np.array(logprobs, dtype=np.float32),
        versions=VersionRuns(((0, 3),)),
        finish_reason="stop",
    )
    return ProbeReport(fixed_logprobs=(np.array([-1.0], dtype=np.float32),), sampled=(response,), probe_s=0.0)


def test_probe_scores_continuations_over_the_kept_set_and_fixed_sequences_over_all() -> None:
    plan = plan_probe(
        prompts=[(5, 6)],
        sampling=SAMPLING,
        vocab_size=20,
        max_model_len=64,
        longest_tokens=64,
        num_sequences=1,
        num_tokens=3,
        seed=0,
    )
    request = plan.sampled_request([report_of([-1.0, -2.0, -3.0])])
    assert (request.temperature, request.top_p, request.top_k) == (0.99, 0.99, 100)
    fixed = plan.fixed_request(with_long=False)
    assert (fixed.temperature, fixed.top_p, fixed.top_k) == (1.0, 1.0, 0)


def test_gap_when_a_token_is_outside_the_trainers_kept_set_leaves_it_out() -> None:
    fixed = ActorForwardResult(
        logprobs=np.array([-1.0], dtype=np.float32), entropies=np.zeros(1, dtype=np.float32), compute_s=0.0
    )
    sampled = ActorForwardResult(
        logprobs=np.array([-1.5, -np.inf, -3.0], dtype=np.float32),
        entropies=np.zeros(3, dtype=np.float32),
        compute_s=0.0,
    )
    (gap,) = gaps_of(["a:1"], [report_of([-1.0, -2.0, -3.0])], fixed, sampled, 1)
    assert gap.sampled.num_tokens == 2
    assert gap.sampled.mean == pytest.approx(0.25)
    assert combined([gap.fixed, gap.sampled]).max == pytest.approx(0.5)
