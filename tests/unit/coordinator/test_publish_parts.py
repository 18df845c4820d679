"""The parts of a publication that need no server."""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import replace

import numpy as np
import pytest

from asyppo_async.errors import AsyppoError, FleetUnavailable, WeightSyncError, WorkerError
from asyppo_async.rpc.calls import ProbeReport
from asyppo_async.trainer.coordinator import parties as parties_module
from asyppo_async.trainer.coordinator.pace import Pace
from asyppo_async.trainer.coordinator.parties import all_parties, party_and_others
from asyppo_async.trainer.coordinator.probing import (
    LongTurns,
    ServerGap,
    check_fresh,
    combined,
    gaps_of,
    plan_probe,
    worst_of,
)
from asyppo_async.trainer.coordinator.publication import bound_from
from asyppo_async.trainer.worker.messages import ActorForwardResult
from asyppo_async.types import Response, SamplingParams, VersionRuns
from asyppo_async.weights.probe import ProbeGap

SAMPLING = SamplingParams(
    temperature=0.7, top_p=1.0, top_k=0, min_tokens=5, max_tokens=99, stop_token_ids=(1,)
)


async def after(seconds: float, outcome: int | AsyppoError) -> int:
    await asyncio.sleep(seconds)
    if isinstance(outcome, AsyppoError):
        raise outcome
    return outcome


async def test_together_when_all_succeed_then_results_are_in_their_order() -> None:
    assert await all_parties([after(0.05, 1), after(0.0, 2), after(0.02, 3)]) == [1, 2, 3]
    assert await all_parties([]) == []


@pytest.mark.parametrize(
    "parts",
    [
        [(0.0, WorkerError("connection reset")), (0.2, FleetUnavailable("server a:1 is gone")), (0.0, 1)],
        [(0.2, FleetUnavailable("server a:1 is gone")), (0.0, WorkerError("connection reset"))],
        [(0.0, FleetUnavailable("server a:1 is gone")), (0.1, WorkerError("connection reset"))],
    ],
)
async def test_together_when_peers_notice_first_then_the_servers_own_words_win(
    parts: list[tuple[float, int | AsyppoError]],
) -> None:
    with pytest.raises(FleetUnavailable, match="server a:1 is gone"):
        await all_parties([after(*part) for part in parts])


async def test_together_when_one_fails_then_the_others_are_cancelled_after_a_while() -> None:
    cancelled = asyncio.Event()

    async def long() -> int:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return 1

    started_s = time.monotonic()
    with pytest.raises(WorkerError, match="it failed"):
        await all_parties([long(), after(0.0, WorkerError("it failed"))])
    assert cancelled.is_set()
    assert time.monotonic() - started_s < parties_module.EXPLAIN_S + 1


async def test_together_when_it_is_cancelled_then_its_parts_are() -> None:
    cancelled = asyncio.Event()

    async def long() -> int:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()
        return 1

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await all_parties([long()])
    assert cancelled.is_set()


async def test_together_when_a_part_has_a_bug_then_it_is_not_hidden() -> None:
    async def bug() -> int:
        raise ZeroDivisionError

    parts: list[Coroutine[object, object, int]] = [bug(), after(0.0, 1)]
    with pytest.raises(BaseExceptionGroup) as caught:
        await all_parties(parts)
    assert caught.group_contains(ZeroDivisionError)


async def test_beside_when_all_succeed_then_the_one_comes_apart() -> None:
    async def text() -> str:
        return "sent"

    assert await party_and_others(text(), [after(0.01, 1), after(0.0, 2)]) == ("sent", [1, 2])
    with pytest.raises(FleetUnavailable):
        await party_and_others(text(), [after(0.01, FleetUnavailable("a")), after(0.0, 2)])


def test_pace_when_a_leg_was_measured_then_three_times_the_slowest_is_its_deadline() -> None:
    pace = Pace(min_deadline_s=5.0, num_bytes=500_000_000)
    assert pace.deadline_s("stage") == 30.0  # 500 MB at the assumed 50 MB/s, three times
    pace.measured("stage", 4.0)
    pace.measured("stage", 3.0)
    assert pace.deadline_s("stage") == 12.0
    assert pace.deadline_s("commit") == 30.0
    pace.measured("commit", 0.1)
    assert pace.deadline_s("commit") == 5.0


@pytest.mark.parametrize(
    ("floor", "dtype", "bound"),
    [
        (1e-7, "float32", 1e-5),
        (5e-6, "float32", 5e-5),
        (5e-4, "float32", 5e-3),
        (2e-3, "float32", 1e-3),
        (float("inf"), "float32", 1e-3),
        (1.4e-3, "bfloat16", 1.4e-2),
        (0.03, "bfloat16", 0.3),
        (0.2, "bfloat16", 0.1),
    ],
)
def test_bound_from_when_given_a_floor_then_it_is_ten_times_it_within_limits(
    floor: float, dtype: str, bound: float
) -> None:
    assert bound_from(floor, dtype) == pytest.approx(bound)  # type: ignore[arg-type]


def probe_plan(prompts: list[list[int]], **changes: int):
    values = {"vocab_size": 50, "max_model_len": 40, "longest_tokens": 40}
    values |= {"num_sequences": 3, "num_tokens": 8, "seed": 0}
    return plan_probe(prompts=prompts, sampling=SAMPLING, **{**values, **changes})


def test_plan_probe_when_there_are_few_prompts_then_they_repeat_and_the_shortest_come_first() -> None:
    plan = probe_plan([[1, 2, 3], [4]])
    assert [prompt.tolist() for prompt in plan.prompts] == [[4], [1, 2, 3], [4]]
    assert (plan.sampling.temperature, plan.sampling.max_tokens, plan.sampling.min_tokens) == (0.7, 8, 0)
    assert plan.sampling.stop_token_ids == (1,)
    assert [len(sequence) for sequence in plan.fixed] == [
        2,
        17,
        39,
    ]  # one place for the token that is generated


def test_plan_probe_when_prompts_fill_the_model_then_the_continuation_is_cut_or_refused() -> None:
    assert probe_plan([[1] * 38]).sampling.max_tokens == 2
    with pytest.raises(WeightSyncError, match="leaves room for a probe within 40 tokens"):
        probe_plan([[1] * 40])
    with pytest.raises(WeightSyncError, match="leaves room"):
        probe_plan([])


def response(*logprobs: float, version: int = 3) -> Response:
    count = len(logprobs)
    return Response(
        token_ids=np.arange(count, dtype=np.int32),
        behaviour_logprobs=np.array(logprobs, np.float32),
        versions=VersionRuns(((version, count),)),
        finish_reason="length",
    )


def report(fixed: list[float], *responses: Response) -> ProbeReport:
    return ProbeReport(fixed_logprobs=(np.array(fixed, np.float32),), sampled=responses, probe_s=0.0)


def scores(*logprobs: float) -> ActorForwardResult:
    values = np.array(logprobs, np.float32)
    return ActorForwardResult(logprobs=values, entropies=values, compute_s=0.0)


def test_gaps_of_when_servers_differ_then_each_is_compared_with_its_own_tokens() -> None:
    good = report([-1.0, -2.0], response(-1.0), response(-2.0, -3.0))
    bad = report([-1.0, -2.5], response(-4.0, -5.0), response(-6.0))
    gaps = gaps_of(["a", "b"], [good, bad], scores(-1.0, -2.0), scores(-1, -2, -3, -4, -5.5, -7), 1)
    assert [gap.mean for gap in gaps] == [0.0, 0.5]
    assert gaps[1].fixed == ProbeGap(mean=0.25, max=0.5, num_tokens=2)
    assert gaps[1].sampled == ProbeGap(mean=0.5, max=1.0, num_tokens=3)
    assert combined([gap.sampled for gap in gaps]) == ProbeGap(mean=0.25, max=1.0, num_tokens=6)


def test_worst_of_when_a_server_was_probed_three_times_then_its_largest_gap_counts() -> None:
    def gap(address: str, mean: float) -> ServerGap:
        fixed, sampled = (ProbeGap(mean=each, max=each, num_tokens=1) for each in (0.0, mean))
        return ServerGap(address=address, fixed=fixed, sampled=sampled)

    probes = [gap("a", 1.0), gap("a", 3.0), gap("a", 2.0), gap("b", 0.5), gap("b", 0.1), gap("b", 0.4)]
    assert worst_of(probes) == [probes[1], probes[3]]
    long = replace(probes[2], long=ProbeGap(mean=0.0, max=0.0, num_tokens=9))
    assert worst_of([long, probes[1]]) == [replace(probes[1], long=long.long)]


@pytest.mark.parametrize(
    ("longest_tokens", "max_model_len", "lengths"),
    [(300, 512, [299]), (600, 512, [511]), (130, 512, []), (131, 512, [130]), (512, 60, [])],
)
def test_plan_probe_when_the_run_is_longer_than_the_fixed_sequences_then_one_is_as_long_as_its_longest(
    longest_tokens: int, max_model_len: int, lengths: list[int]
) -> None:
    plan = probe_plan([[1]], max_model_len=max_model_len, longest_tokens=longest_tokens)
    assert [len(sequence) for sequence in plan.long] == lengths
    assert plan.scored(with_long=False) == plan.fixed
    request = plan.fixed_request(with_long=True)
    assert request.sequences.response_lengths.tolist()[3:] == [length - 1 for length in lengths]


def test_gaps_of_when_only_the_long_sequence_differs_then_the_others_do_not_hide_it() -> None:
    short, long = np.array([-1.0, -2.0], np.float32), np.array([-3.0, -4.0], np.float32)
    reports = [
        ProbeReport(fixed_logprobs=arrays, sampled=(response(-1.0),), probe_s=0.0)
        for arrays in ((short, long), (short,))
    ]
    with_long, without = gaps_of(["a", "a"], reports, scores(-1, -2, -3, -5), scores(-1, -1), 1)
    assert (with_long.fixed.mean, with_long.long.mean, with_long.mean) == (0.0, 0.5, 0.5)
    assert (without.long.num_tokens, without.mean) == (0, 0.0)


@pytest.mark.parametrize(
    ("every", "turns"), [(3, [True, False, False, True, False, True]), (0, [True, *[False] * 4, True])]
)
def test_long_turns_when_somebody_is_new_or_the_time_has_come_then_it_is_due(
    every: int, turns: list[bool]
) -> None:
    long_turns, due = LongTurns(every), []
    for epoch in (1, 1, 1, 1, 1, 2):
        due.append(long_turns.is_due(epoch))
        long_turns.passed(epoch)
    assert due == turns


def test_sampled_request_when_there_are_two_servers_then_it_holds_all_continuations_in_order() -> None:
    plan = probe_plan([[7, 8], [9]], num_sequences=2)
    request = plan.sampled_request([report([], response(-1.0), response(-2.0, -3.0))] * 2)
    assert request.temperature == 0.7
    assert request.sequences.prompt_token_ids.tolist() == [9, 7, 8] * 2
    assert request.sequences.response_lengths.tolist() == [1, 2] * 2
    fixed = plan.fixed_request(with_long=True)
    assert fixed.temperature == 1.0
    assert fixed.sequences.response_lengths.tolist() == [1, 16, 38]


def test_check_fresh_when_other_weights_sampled_then_it_is_refused() -> None:
    check_fresh("a:1", 3, report([], response(-1.0)))
    with pytest.raises(WeightSyncError, match=r"server a:1, probe of version 3: .* by versions \[2\]"):
        check_fresh("a:1", 3, report([], response(-1.0), response(-1.0, version=2)))
