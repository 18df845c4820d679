"""Between trainer and fleet: a cut, a delay, a port that refuses, and a stream of garbage."""

import signal
from pathlib import Path

import pytest

from tests.integration.chaos.conftest import (
    ChaosRunner,
    ScriptedServer,
    check_lineage,
    rows,
    serving_scripted,
    wait_for_steps,
    wait_until,
)
from tests.integration.chaos.proxies import garbling, wire_to


@pytest.mark.timeout(200)
def test_run_over_a_stream_of_garbage_trains_what_is_sound_and_lists_the_rest(
    runner: ChaosRunner, server: ScriptedServer
) -> None:
    with garbling(server.address) as garbler:
        process = runner.start(
            "garbage", "--fleet", f"127.0.0.1:{garbler.port}", "--set", "failures.infrastructure_share=0.9"
        )
        done = runner.finish(process, "garbage", timeout_s=180)
    assert done.code == 0, done.err
    check_lineage(done, 40)
    assert min(garbler.done[fault] for fault in garbler.FAULTS) >= 1, garbler.done
    returned = [row["reason"] for row in rows(done.folder, "draws.jsonl") if row["outcome"] == "returned"]
    # Not of every fault: what the end of the run finds in flight is listed under the end of the run.
    assert "rolled_back" in returned and "garbled" in returned, returned
    lost = done.summary["responses_lost"]
    assert isinstance(lost, dict) and lost["non_finite_logprob"] > 0
    log = (done.folder / "logs" / "trainer.log").read_text()
    assert "breaks the contract" in log and "a behaviour log-prob is not finite" in log
    assert all(row["actor/skipped_steps"] == 0 for row in rows(done.folder, "metrics.jsonl"))


@pytest.mark.report("P46")
@pytest.mark.timeout(280)
def test_run_whose_network_is_slow_then_cut_then_refuses_goes_on_by_itself_or_ends_with_the_words(
    runner: ChaosRunner, models: Path, tmp_path: Path, server: ScriptedServer
) -> None:
    with serving_scripted(models, tmp_path / "other") as other, wire_to(other.address) as wire:
        wire.delay_s = 0.05
        process = runner.start(
            "cut", "--fleet", f"{server.address},{wire.address}", "--set", "run.num_steps=30"
        )
        folder = runner.folder / "runs" / "cut"
        wait_for_steps(process, folder, 2)
        wire.cut()
        wait_for_steps(process, folder, 2)
        wire.mend()
        wait_until(
            lambda: rows(folder, "metrics.jsonl")[-1]["weights/servers"] == 2,
            60,
            "the server behind the wire is back",
            alive=lambda: process.poll() is None,
        )
        other.process.send_signal(signal.SIGKILL)
        done = runner.finish(process, "cut", timeout_s=180)
    assert done.code == 0, done.err
    assert wire.num_refused > 0
    assert done.summary["servers_lost"] >= 2 and done.summary["servers_rejoined"] >= 1
    assert done.summary["groups_trained"] == 120
    log = (folder / "logs" / "trainer.log").read_text()
    assert f"server {wire.address} is lost" in log and f"server {wire.address} is back" in log
