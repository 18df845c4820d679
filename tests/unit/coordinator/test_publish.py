"""Publications over real gRPC and real gloo; only the engines are scripted."""

import asyncio
import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from asyppo_async.config.sections import WeightsSection
from asyppo_async.errors import FleetError, FleetUnavailable, WeightSyncError
from asyppo_async.trainer.coordinator.embedded_fleet import child_server
from asyppo_async.trainer.coordinator.membership import Fleet, connect
from asyppo_async.trainer.coordinator.publish import Publisher, open_publisher
from asyppo_async.types import Prompt, Response
from asyppo_async.weights.manifest import TensorSpec
from tests.unit.coordinator.publish_fleet import (
    RUN,
    SAMPLING,
    SETTINGS,
    Sender,
    Server,
    expected_of,
    fleet_of,
    plan,
    write_model,
)

PROMPT = Prompt(id="p", task="t", text="", token_ids=(5, 6), answer="")


@asynccontextmanager
async def publishing(
    folder: Path, sender: Sender, *, count: int = 1, settings: WeightsSection = SETTINGS
) -> AsyncIterator[tuple[Publisher, Fleet, list[Server]]]:
    async with (
        fleet_of(sender.model, folder, count) as (fleet, started),
        open_publisher(
            sender=sender, fleet=fleet, settings=settings, plan=plan(), host="127.0.0.1", version=0
        ) as publisher,
    ):
        yield publisher, fleet, started


async def one_response(fleet: Fleet) -> Response:
    generated = await fleet.generate(
        PROMPT, num_samples=1, sampling=SAMPLING, deadline_s=10.0, on_tokens=lambda _: None
    )
    return generated.responses[0]


async def test_publish_when_all_agree_then_every_server_serves_it_and_the_floor_is_measured(
    tmp_path: Path,
) -> None:
    sender = Sender(write_model(tmp_path / "model"))
    async with publishing(tmp_path, sender, count=2) as (publisher, fleet, _):
        first = publisher.first
        assert first is not None
        assert (first.version, first.attempts, len(first.servers)) == (0, 1, 2)
        assert first.mean_gap < 1e-6  # the scripted engine computes in float32
        assert first.bound == 1e-5
        # Fixed: 2, 17 and 129 tokens, the first of each not scored; sampled: 4 prompts, at most 8 tokens each.
        assert first.fixed.num_tokens == 2 * (1 + 16 + 128)
        assert 0 < first.sampled.num_tokens <= 2 * 4 * 8
        assert sender.temperatures == [1.0, pytest.approx(0.7)]
        assert first.num_bytes == (await sender.manifest()).num_bytes

        published = await publisher.publish(1)
        assert (published.version, published.attempts) == (1, 1)
        for member in fleet.members:
            info = await member.client.info(5.0)
            assert (info.state, info.served_version) == ("serving", 1)
            assert (info.run_id, info.incarnation) == ("run", 1)
        assert (await one_response(fleet)).versions.tolist() == [1] * 64
    assert sender.seen[-1] == "close"


async def test_publish_when_it_is_timed_then_every_phase_has_its_seconds(tmp_path: Path) -> None:
    sender = Sender(write_model(tmp_path / "model"), delay_s=0.3)
    async with publishing(tmp_path, sender) as (publisher, _, _):
        published = await publisher.publish(1)
    timings = published.timings
    assert 0.3 < timings.stage_s < published.total_s
    assert 0 < timings.commit_s < published.total_s
    assert 0 < timings.probe_s < published.total_s
    assert 0 < timings.score_s < published.total_s
    assert timings.stage_s + timings.commit_s + timings.probe_s + timings.score_s <= published.total_s
    assert timings.pause_s + timings.load_s + timings.resume_s <= timings.commit_s
    metrics = published.metrics()
    assert metrics["weights/stage_s"] == timings.stage_s
    assert metrics["probe/fresh_tokens"] == published.sampled.num_tokens
    assert all(math.isfinite(value) for value in metrics.values())


async def test_publish_when_the_actor_scores_slowly_then_the_servers_load_and_probe_beside_it(
    tmp_path: Path,
) -> None:
    sender = Sender(write_model(tmp_path / "model"), score_s=1.0)
    async with publishing(tmp_path, sender) as (publisher, _, started):
        assert sender.seen == ["send 0", "score fixed", "score sampled"]
        engine = [what.split()[0] for what in started[0].engine.seen]
        assert engine[:5] == ["verify", "pause", "load", "resume", "score"]
        assert publisher.first is not None
        timings = publisher.first.timings
        assert timings.commit_s + timings.probe_s < 1.0
        assert publisher.first.total_s > 2.0  # both halves were scored


async def test_publish_when_one_probe_fails_then_a_complete_repeat_heals_it(tmp_path: Path) -> None:
    sender = Sender(write_model(tmp_path / "model"))
    async with publishing(tmp_path, sender) as (publisher, fleet, _):
        sender.offsets = [0.01]
        published = await publisher.publish(1)
        assert published.attempts == 2
        assert sender.seen.count("send 1") == 2
        assert published.mean_gap < 1e-6
        assert (await one_response(fleet)).versions.tolist() == [1] * 64


async def test_publish_when_both_probes_fail_then_server_phase_and_gap_are_named(tmp_path: Path) -> None:
    sender = Sender(write_model(tmp_path / "model"))
    async with publishing(tmp_path, sender) as (publisher, fleet, started):
        sender.offsets = [0.01, 0.02]
        with pytest.raises(
            WeightSyncError,
            match=rf"publication of version 1: phase probe: server {started[0].address}: .*0\.02 nats.*"
            r"bound is 1e-05; a complete repeat did not change that",
        ):
            await publisher.publish(1)
        info = await fleet.members[0].client.info(5.0)
        assert (info.state, info.served_version) == ("weights_unknown", -1)
        with pytest.raises(FleetError, match="weights unknown"):
            await one_response(fleet)


async def test_publish_when_the_first_gap_is_beyond_reason_then_it_is_no_floor(tmp_path: Path) -> None:
    sender = Sender(write_model(tmp_path / "model"), offsets=[0.01, 0.01])
    with pytest.raises(WeightSyncError, match=r"version 0: phase probe: .*the bound is 0\.001"):
        async with publishing(tmp_path, sender):
            pytest.fail("the first publication failed")
    assert sender.seen[-1] == "close"


async def test_publish_when_the_floor_is_higher_then_the_bound_is_ten_times_it(tmp_path: Path) -> None:
    sender = Sender(write_model(tmp_path / "model"), offsets=[5e-5])
    async with publishing(tmp_path, sender) as (publisher, _, _):
        assert publisher.first is not None
        assert publisher.first.bound == pytest.approx(5e-4, rel=0.01)
        sender.offsets = [4e-4]
        assert (await publisher.publish(1)).attempts == 1
        sender.offsets = [6e-4]
        assert (await publisher.publish(2)).attempts == 2


async def test_publish_when_a_tolerance_is_set_then_it_is_the_bound(tmp_path: Path) -> None:
    sender = Sender(write_model(tmp_path / "model"), offsets=[0.4])
    settings = SETTINGS.model_copy(update={"probe_tolerance": 0.5})
    async with publishing(tmp_path, sender, settings=settings) as (publisher, _, _):
        assert publisher.first is not None
        assert (publisher.first.attempts, publisher.first.bound) == (1, 0.5)


async def test_publish_when_a_score_is_not_a_number_then_the_probe_fails(tmp_path: Path) -> None:
    sender = Sender(write_model(tmp_path / "model"))
    async with publishing(tmp_path, sender) as (publisher, _, _):
        sender.offsets = [math.nan, math.nan]
        with pytest.raises(WeightSyncError, match="differ by inf nats"):
            await publisher.publish(1)


async def test_publish_when_a_load_fails_then_the_servers_words_are_in_the_error(tmp_path: Path) -> None:
    sender = Sender(write_model(tmp_path / "model"))
    async with publishing(tmp_path, sender, count=2) as (publisher, _, started):
        started[1].engine.faults["load"] = "a tensor does not fit"
        with pytest.raises(
            WeightSyncError,
            match=rf"version 1: phase commit: server {started[1].address}: .*a tensor does not fit",
        ):
            await publisher.publish(1)


async def test_publish_when_a_staged_checksum_differs_in_the_engine_then_the_old_version_serves(
    tmp_path: Path,
) -> None:
    sender = Sender(write_model(tmp_path / "model"))
    async with publishing(tmp_path, sender) as (publisher, fleet, started):
        started[0].engine.faults["verify"] = "bytes differ"
        with pytest.raises(WeightSyncError, match=r"phase commit: .*bytes differ.* \[DATA_LOSS\]"):
            await publisher.publish(1)
        assert (await one_response(fleet)).versions.tolist() == [0] * 64


async def test_publish_when_other_bytes_arrive_then_the_tensor_is_named_and_nothing_is_committed(
    tmp_path: Path,
) -> None:
    sender = Sender(write_model(tmp_path / "model"))
    async with publishing(tmp_path, sender) as (publisher, fleet, started):
        sender.corrupt = True
        with pytest.raises(
            WeightSyncError,
            match=rf"phase stage: server {started[0].address} received other bytes .*1 of 4 tensors differ, the "
            r"first is model\.embed_tokens\.weight",
        ):
            await publisher.publish(1)
        assert (await one_response(fleet)).versions.tolist() == [0] * 64


async def test_publish_when_the_sender_fails_then_its_words_come_in_seconds(tmp_path: Path) -> None:
    sender = Sender(write_model(tmp_path / "model"))
    async with publishing(tmp_path, sender) as (publisher, fleet, _):
        sender.fail = "rank 0 of the actor died"
        started_s = time.monotonic()
        with pytest.raises(WeightSyncError, match="version 1: phase stage: rank 0 of the actor died"):
            await publisher.publish(1)
        assert time.monotonic() - started_s < 4
        assert (await one_response(fleet)).versions.tolist() == [0] * 64


async def test_publish_when_a_server_is_gone_then_it_is_named(tmp_path: Path) -> None:
    sender = Sender(write_model(tmp_path / "model"))
    async with publishing(tmp_path, sender, count=2) as (publisher, _, started):
        started[1].stop.received.set()
        await asyncio.sleep(1.5)
        started_s = time.monotonic()
        with pytest.raises(WeightSyncError, match=rf"phase stage: server {started[1].address}"):
            await publisher.publish(1)
        assert time.monotonic() - started_s < 10


async def test_open_publisher_when_the_tensors_differ_then_both_sides_are_listed(tmp_path: Path) -> None:
    more = TensorSpec(name="lm_head.weight", shape=(64, 16), dtype="float32")
    sender = Sender(write_model(tmp_path / "model"), extra=(more,))
    with pytest.raises(
        WeightSyncError, match=r"weight session: phase open: server .*unexpected: lm_head\.weight"
    ):
        async with publishing(tmp_path, sender):
            pytest.fail("it did not open")


async def test_set_version_when_no_byte_changed_then_tokens_carry_the_new_number(tmp_path: Path) -> None:
    sender = Sender(write_model(tmp_path / "model"))
    async with publishing(tmp_path, sender, count=2) as (publisher, fleet, _):
        await publisher.set_version(3)
        assert "send 3" not in sender.seen
        response = await one_response(fleet)
        assert response.versions.tolist() == [3] * 64
        assert response.behaviour_logprobs[0] == np.float32(-2.0)  # still the first load
        with pytest.raises(WeightSyncError, match="set version"):
            await publisher.set_version(2)


async def test_publish_when_responses_are_in_flight_then_they_carry_both_versions(tmp_path: Path) -> None:
    sender = Sender(write_model(tmp_path / "model"))
    async with publishing(tmp_path, sender) as (publisher, fleet, _):
        arrived = asyncio.Event()

        async def generate() -> Response:
            generated = await fleet.generate(
                PROMPT,
                num_samples=1,
                sampling=SAMPLING,
                deadline_s=10.0,
                on_tokens=lambda num_tokens: arrived.set() if num_tokens >= 8 else None,
            )
            return generated.responses[0]

        async with asyncio.TaskGroup() as tasks:
            responding = tasks.create_task(generate())
            await asyncio.wait_for(arrived.wait(), 5.0)
            await publisher.publish(1)
        versions = (await responding).versions.tolist()
        assert versions == sorted(versions)
        assert len(versions) == 64


async def test_generate_when_a_server_has_ended_then_the_error_names_it(tmp_path: Path) -> None:
    sender = Sender(write_model(tmp_path / "model"))
    async with publishing(tmp_path, sender) as (_, fleet, started):
        started[0].stop.received.set()
        await asyncio.sleep(1.5)
        with pytest.raises(FleetUnavailable, match=f"server {started[0].address}: Generate run-1-"):
            await one_response(fleet)
        assert fleet.members[0].outstanding_tokens == 0


@pytest.mark.parametrize(("signal_number", "at_most_s"), [(signal.SIGKILL, 4.0), (signal.SIGSTOP, 8.0)])
async def test_publish_when_a_server_dies_or_freezes_in_mid_transfer_then_it_is_named_within_the_deadline(
    tmp_path: Path, signal_number: signal.Signals, at_most_s: float
) -> None:
    sender = Sender(write_model(tmp_path / "model"))
    settings = SETTINGS.model_copy(update={"min_deadline_s": 3.0})
    script = str(Path(__file__).with_name("scripted_server.py"))
    # `child_server` appends `--ready-file PIPE`: the script takes the pipe as its second argument.
    shell = f'exec "{sys.executable}" "{script}" "{sender.model}" "$2"'
    log = tmp_path / "server.log"
    async with (
        child_server(["/bin/sh", "-c", f"echo pid $$; {shell}", "sh"], log, 30.0) as address,
        connect([address], expected_of(sender.model), RUN, 10.0) as fleet,
        open_publisher(
            sender=sender, fleet=fleet, settings=settings, plan=plan(), host="127.0.0.1", version=0
        ) as publisher,
    ):
        pid = int(log.read_text().split()[1])
        sender.delay_s = 0.6
        asyncio.get_running_loop().call_later(0.3, os.kill, pid, signal_number)
        started_s = time.monotonic()
        with pytest.raises(WeightSyncError, match=f"version 1: phase stage: server {address}"):
            await publisher.publish(1)
        assert time.monotonic() - started_s < at_most_s
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
