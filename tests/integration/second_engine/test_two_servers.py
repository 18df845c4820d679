"""A fleet of two real engines: work goes to both, an evaluation pins one of them; one is frozen, cut off, killed."""

import json
import signal
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from asyppo_async.rpc.pool import FleetPool
from asyppo_async.types import SamplingParams
from tests.integration.chaos.proxies import wire_to
from tests.integration.run.conftest import Finished, Runner, Server
from tests.integration.run.test_run import wait_for_steps

pytestmark = pytest.mark.engine


@pytest.mark.report("P78")
async def test_pair_when_both_are_asked_for_the_same_then_each_samples_its_own(pair: list[Server]) -> None:
    """Engines that begin with one seed would give a group the same responses from every server."""
    sampling = SamplingParams(
        temperature=1.0, top_p=1.0, top_k=0, min_tokens=0, max_tokens=24, stop_token_ids=()
    )
    responses: list[tuple[int, ...]] = []
    for server in pair:
        async with FleetPool([server.address]) as pool:
            made = await pool.generate([3, 4, 5], num_samples=8, sampling=sampling, deadline_s=60)
        responses += [tuple(response.token_ids.tolist()) for response in made]
    assert len(set(responses)) == 16


def test_run_on_two_servers_when_it_evaluates_in_passing_then_one_stands_aside_and_comes_back(
    runner: Runner, pair: list[Server]
) -> None:
    """Trains until an evaluation outlasted a step and the one after it: how long each takes is the machine's affair."""
    settings = ["run.num_steps=1000", "evaluation.every_steps=4", "evaluation.samples_per_prompt=200"]
    settings += ["evaluation.num_prompts=8", "evaluation.greedy=false", "staleness.max_staleness=2"]
    fleet = ",".join(server.address for server in pair)
    sets = (part for setting in settings for part in ("--set", setting))
    process = runner.start("evaluating", "--fleet", fleet, *sets)
    try:
        wait_for_turns(runner.folder / "runs" / "evaluating", [2, 1, 2])
    finally:
        process.send_signal(signal.SIGTERM)
        done = runner.finish(process, "evaluating", 60)
    assert done.code == 130, done.err
    summary = done.summary
    assert summary["steps"] == len(done.rows) and summary["groups_dropped"] == 0
    assert summary["servers_lost"] == 0, "a server that evaluates is not taken for a lost one"
    assert summary["max_staleness_seen"] <= summary["max_staleness_bound"] == 2
    assert summary["logprob_gap_fresh_mean"] < 1e-4
    passing = evaluations_in_passing(done)
    assert sum(row["skipped_publications"] for row in passing) > 0
    for row in passing:
        assert row["server"] in fleet
        assert row["oldest_version"] == row["version"] and row["repeated_responses"] == 0
        assert row["held_s"] == 0


def evaluations_in_passing(done: Finished) -> list[dict[str, Any]]:
    lines = (done.folder / "evaluations.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["server"]]


def wait_for_turns(folder: Path, turns: list[int]) -> None:
    """Until the numbers of servers that steps published to went through `turns`, in this order."""
    deadline_s = time.monotonic() + 150
    while [number for number, _ in groupby(published_to(folder))][: len(turns)] != turns:
        assert time.monotonic() < deadline_s, f"not through {turns} within 150 s: {published_to(folder)}"
        time.sleep(0.1)


@pytest.mark.report("P46")
@pytest.mark.long
@pytest.mark.timeout(400)
def test_run_on_two_servers_when_one_is_frozen_and_then_cut_off_then_its_work_moves_on_and_it_comes_back(
    runner: Runner, pair: list[Server]
) -> None:
    """The real engine goes on behind the cut, and where it was frozen, with weights that are old by then."""
    folder = runner.folder / "runs" / "frozen"
    settings = [
        "run.num_steps=1000",
        "fleet.silence_s=3",
        "weights.min_deadline_s=10",
        "evaluation.every_steps=0",
    ]
    settings += ["weights.kv_on_update=recompute", "staleness.max_staleness=2", "staleness.lead=saturated"]
    sets = (part for setting in settings for part in ("--set", setting))
    with wire_to(pair[1].address) as wire:
        process = runner.start("frozen", "--fleet", f"{pair[0].address},{wire.address}", *sets)
        wait_for_servers(folder, 2, steps=2)
        pair[1].process.send_signal(signal.SIGSTOP)
        frozen_s = seconds(lambda: wait_for_servers(folder, 1, steps=2))
        pair[1].process.send_signal(signal.SIGCONT)
        wait_for_servers(folder, 2, steps=1)
        wire.cut()
        cut_s = seconds(lambda: wait_for_servers(folder, 1, steps=2))
        wire.mend()
        wait_for_servers(folder, 2, steps=2)
        process.send_signal(signal.SIGTERM)
        done = runner.finish(process, "frozen", 60)
    print(f"two steps without the server: {frozen_s:.1f} s after it froze, {cut_s:.1f} s after the cut")
    assert done.code == 130, done.err
    summary, rows = done.summary, done.rows
    assert summary["servers_lost"] == summary["servers_rejoined"] == 2 and summary["calls_moved"] >= 1
    assert summary["groups_trained"] == 4 * len(rows), "no step was short of a group"
    assert summary["max_staleness_seen"] <= summary["max_staleness_bound"] == 2
    log = (folder / "logs" / "trainer.log").read_text()
    assert log.count(f"server {wire.address} is lost") == log.count(f"server {wire.address} is back") == 2
    assert "go on elsewhere" in log
    assert summary["logprob_gap_fresh_mean"] < 1e-4, "it serves the newest weights again, or nothing"
    gaps = [row["mismatch/gap_mean_staleness_0"] for row in rows if "mismatch/gap_mean_staleness_0" in row]
    assert max(gaps) < 1e-4, "what moved on agrees with the trainer's scores, token by token"


def wait_for_servers(folder: Path, number: int, *, steps: int) -> None:
    """Until so many steps more were made that published to this number of servers."""
    deadline_s, start = time.monotonic() + 120, len(published_to(folder))
    while (published := published_to(folder)[start:]).count(number) < steps:
        assert time.monotonic() < deadline_s, f"not {number} servers within 120 s: {published}"
        time.sleep(0.1)


def published_to(folder: Path) -> list[int]:
    """How many servers each step so far published its weights to."""
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    return [int(json.loads(line)["weights/servers"]) for line in lines]


def seconds(work: Callable[[], None]) -> float:
    started_s = time.monotonic()
    work()
    return time.monotonic() - started_s


def test_run_on_two_servers_when_one_is_killed_then_goes_on_with_the_other(
    runner: Runner, pair: list[Server]
) -> None:
    fleet = ",".join(server.address for server in pair)
    # Kept, KV of older weights would move the tokens after an update off the trainer's scores, whoever made them.
    recompute = ("--set", "weights.kv_on_update=recompute")
    process = runner.start("survivor", "--fleet", fleet, "--set", "run.num_steps=10", *recompute)
    wait_for_steps(runner.folder / "runs" / "survivor", 3)
    pair[1].process.kill()
    pair[1].process.wait()
    done = runner.finish(process, "survivor")
    assert done.code == 0, done.err
    summary, rows = done.summary, done.rows
    assert summary["steps"] == 10 and summary["groups_trained"] == 40 and summary["groups_dropped"] == 0
    assert summary["servers_lost"] == 1 and summary["max_staleness_seen"] <= summary["max_staleness_bound"]
    assert summary["logprob_gap_fresh_mean"] < 1e-4
    assert (rows[0]["weights/servers"], rows[-1]["weights/servers"]) == (2, 1)
    # What the killed server had made is not lost: it went on, and its tokens still agree with the trainer's scores.
    gaps = [row["mismatch/gap_mean_staleness_0"] for row in rows if "mismatch/gap_mean_staleness_0" in row]
    assert gaps and max(gaps) < 1e-4, gaps
