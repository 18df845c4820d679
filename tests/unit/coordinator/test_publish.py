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
from asyppo_async.rpc.calls import ResponseParts
from asyppo_async.rpc.codec import SampleTokens
from asyppo_async.rpc.member import Member
from asyppo_async.trainer.coordinator.connecting import connect
from asyppo_async.trainer.coordinator.embedded_fleet import child_server
from asyppo_async.trainer.coordinator.generated import Generated
from asyppo_async.trainer.coordinator.membership import Fleet, RunIdentity
from asyppo_async.trainer.coordinator.publish import Publisher, open_publisher
from asyppo_async.types import FinishReason, Prompt, Response, VersionRuns
from asyppo_async.weights.manifest import TensorSpec
from tests.unit.coordinator.publish_fleet import (
    RUN,
    SAMPLING,
    SETTINGS,
    MarkedBy,
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
    folder: Path,
    sender: Sender,
    *,
    count: int = 1,
    settings: WeightsSection = SETTINGS,
    marked_by: MarkedBy = "load",
) -> AsyncIterator[tuple[Publisher, Fleet, list[Server]]]:
    async with (
        fleet_of(sender.model, folder, count, marked_by) as (fleet, started),
        opened(sender, fleet, settings) as publisher,
    ):
        yield publisher, fleet, started


def opened(
    sender: Sender, fleet: Fleet, settings: WeightsSection
) -> contextlib.AbstractAsyncContextManager[Publisher]:
    """With version 0 published."""
    return open_publisher(
        sender=sender, fleet=fleet, settings=settings, plan=plan(), host="127.0.0.1", version=0
    )


async def one_response(fleet: Fleet, member: Member | None = None) -> Response:
    """From this member, or from whom the fleet would ask for training."""
    generated = await fleet.generate_on(
        member or fleet.least_loaded(),
        PROMPT,
        num_samples=1,
        sampling=SAMPLING,
        deadline_s=10.0,
        on_tokens=lambda _: None,
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
        assert first.long.num_tokens == 2 * 298
        assert 0 < first.sampled.num_tokens <= 2 * 4 * 8
        assert sender.temperatures == [1.0, pytest.approx(0.7)]
        assert first.num_bytes == (await sender.manifest()).num_bytes

        published = await publisher.publish(1)
        assert (published.version, published.attempts) == (1, 1)
        for member in fleet.members:
            info = await member.client.info(5.0)
            assert (info.state, info.served_version) == ("serving", 1)
            assert (info.run_id, info.incarnation) == ("run", 1)
        assert (await one_response(fleet)).versions.per_token().tolist() == [1] * 64
    assert sender.seen[-1] == "close"


@pytest.mark.report("P10")
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


@pytest.mark.report("P20")
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


@pytest.mark.report("P04")
async def test_publish_when_a_verdict_is_missing_then_the_version_is_not_served_yet(tmp_path: Path) -> None:
    sender = Sender(write_model(tmp_path / "model"), score_s=0.3)
    async with publishing(tmp_path, sender, count=2) as (publisher, fleet, _), asyncio.TaskGroup() as tasks:
        publishing_1 = tasks.create_task(publisher.publish(1))
        seen = set()
        while not publishing_1.done():
            seen.add((fleet.state.served_version, len(fleet.current)))
            await asyncio.sleep(0.01)
        assert all(version == 0 for version, _ in seen), "no group is admitted on the new number"
        assert (fleet.state.served_version, len(fleet.current)) == (1, 2)


@pytest.mark.report("P10")
async def test_publish_when_the_buckets_are_many_then_the_control_calls_are_as_many(tmp_path: Path) -> None:
    counts = []
    for bucket_bytes in (1024, 2**20):
        settings = SETTINGS.model_copy(update={"bucket_bytes": bucket_bytes})
        folder = tmp_path / str(bucket_bytes)
        sender = Sender(write_model(folder / "model"), bucket_bytes=bucket_bytes)
        async with publishing(folder, sender, settings=settings) as (publisher, _, started):
            before = len(started[0].engine.seen)
            await publisher.publish(1)
            calls = [what for what in started[0].engine.seen[before:] if not what.startswith("generate")]
            counts.append((len(sender.worker.buckets), [what.split()[0] for what in calls]))
    (many, calls_of_many), (one, calls_of_one) = counts
    assert many > 10 and one == 1 and calls_of_many == calls_of_one


async def test_publish_when_one_probe_fails_then_a_complete_repeat_heals_it(tmp_path: Path) -> None:
    sender = Sender(write_model(tmp_path / "model"))
    async with publishing(tmp_path, sender) as (publisher, fleet, _):
        sender.offsets = [0.01]
        published = await publisher.publish(1)
        assert published.attempts == 2
        assert sender.seen.count("send 1") == 2
        assert published.mean_gap < 1e-6
        assert (await one_response(fleet)).versions.per_token().tolist() == [1] * 64


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
            await one_response(fleet, fleet.members[0])
        with pytest.raises(FleetUnavailable, match="publish before generating"):
            await one_response(fleet)


@pytest.mark.report("P16")
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


async def test_publish_when_only_long_sequences_are_wrong_then_the_long_one_finds_it_at_its_turn(
    tmp_path: Path,
) -> None:
    sender = Sender(write_model(tmp_path / "model"))
    settings = SETTINGS.model_copy(update={"probe_long_every": 3})
    async with publishing(tmp_path, sender, settings=settings) as (publisher, _, started):
        assert publisher.first is not None
        assert publisher.first.metrics()["probe/long_tokens"] == 298
        started[0].engine.skew, started[0].engine.skew_from = 0.01, 200
        for version in (1, 2):
            published = await publisher.publish(version)
            assert (published.attempts, published.long.num_tokens) == (1, 0)
            assert "probe/long_tokens" not in published.metrics()
        with pytest.raises(WeightSyncError, match=r"prefill \S+, sampled \S+, long 0\.003"):
            await publisher.publish(3)


async def test_publish_when_a_tolerance_is_set_then_it_is_the_bound(tmp_path: Path) -> None:
    sender = Sender(write_model(tmp_path / "model"), offsets=[0.4])
    settings = SETTINGS.model_copy(update={"probe_tolerance": 0.5})
    async with publishing(tmp_path, sender, settings=settings) as (publisher, _, _):
        assert publisher.first is not None
        assert (publisher.first.attempts, publisher.first.bound) == (1, 0.5)


@pytest.mark.report("P20")
async def test_publish_when_a_score_is_not_a_number_then_the_probe_fails(tmp_path: Path) -> None:
    sender = Sender(write_model(tmp_path / "model"))
    async with publishing(tmp_path, sender) as (publisher, _, _):
        sender.offsets = [math.nan, math.nan]
        with pytest.raises(WeightSyncError, match="differ by inf nats"):
            await publisher.publish(1)


async def test_publish_when_a_load_fails_then_the_servers_words_are_in_the_error(tmp_path: Path) -> None:
    sender = Sender(write_model(tmp_path / "model"))
    settings = SETTINGS.model_copy(update={"on_failed_server": "fail"})
    async with publishing(tmp_path, sender, count=2, settings=settings) as (publisher, _, started):
        started[1].engine.faults["load"] = "a tensor does not fit"
        with pytest.raises(
            WeightSyncError,
            match=rf"version 1: phase commit: server {started[1].address}: .*a tensor does not fit",
        ):
            await publisher.publish(1)


@pytest.mark.parametrize("point", ["verify", "pause", "load", "resume", "score"])
async def test_publish_when_one_of_two_fails_then_the_other_gets_the_version_at_once_and_it_joins_again(
    tmp_path: Path, point: str
) -> None:
    sender = Sender(write_model(tmp_path / "model"), marked_by="version")
    async with publishing(tmp_path, sender, count=2, marked_by="version") as (publisher, fleet, started):
        started[1].engine.faults[point] = "no memory left"
        if point == "score":
            del started[1].engine.faults[point]
            started[1].engine.skew = 0.5
        began_s = time.monotonic()
        published = await publisher.publish(1)
        assert time.monotonic() - began_s < 2 * SETTINGS.min_deadline_s
        assert [server.address for server in published.servers] == [started[0].address]
        assert fleet.state.is_lost(started[1].address) and fleet.num_lost == 1
        assert (await one_response(fleet)).versions.per_token().tolist() == [1] * 64
        if point == "load":
            async with asyncio.timeout(10):
                while fleet.state.is_lost(started[1].address):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert len((await publisher.publish(2)).servers) == 2


async def test_publish_when_a_staged_checksum_differs_in_the_engine_then_the_old_version_serves(
    tmp_path: Path,
) -> None:
    sender = Sender(write_model(tmp_path / "model"))
    async with publishing(tmp_path, sender) as (publisher, fleet, started):
        started[0].engine.faults["verify"] = "bytes differ"
        with pytest.raises(WeightSyncError, match=r"phase commit: .*bytes differ.* \[DATA_LOSS\]"):
            await publisher.publish(1)
        assert (await one_response(fleet, fleet.members[0])).versions.per_token().tolist() == [0] * 64
        assert fleet.current == (), "the trainer does not rely on it before a complete publication"


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
        assert (await one_response(fleet)).versions.per_token().tolist() == [0] * 64


async def test_publish_when_the_sender_fails_then_its_words_come_in_seconds(tmp_path: Path) -> None:
    sender = Sender(write_model(tmp_path / "model"))
    async with publishing(tmp_path, sender) as (publisher, fleet, _):
        sender.fail = "rank 0 of the actor died"
        started_s = time.monotonic()
        with pytest.raises(WeightSyncError, match="version 1: phase stage: rank 0 of the actor died"):
            await publisher.publish(1)
        assert time.monotonic() - started_s < 4
        assert (await one_response(fleet)).versions.per_token().tolist() == [0] * 64


async def test_publish_when_its_only_server_is_gone_then_it_is_named(tmp_path: Path) -> None:
    sender = Sender(write_model(tmp_path / "model"))
    async with publishing(tmp_path, sender) as (publisher, _, started):
        started[0].stop.received.set()
        await asyncio.sleep(1.5)
        started_s = time.monotonic()
        with pytest.raises(WeightSyncError, match=rf"phase stage: server {started[0].address}"):
            await publisher.publish(1)
        assert time.monotonic() - started_s < 10


@pytest.mark.report("P46")
async def test_open_publisher_when_a_dead_trainer_left_a_load_then_it_waits_for_its_end(
    tmp_path: Path,
) -> None:
    """The load takes longer than a session may wait for it, and not so long as a commit may take."""
    sender = Sender(write_model(tmp_path / "model"), marked_by="version")
    async with fleet_of(sender.model, tmp_path, 2, "version") as (fleet, started):
        engine = started[1].engine
        async with opened(sender, fleet, SETTINGS) as publisher:
            engine.load_s = SETTINGS.min_deadline_s * 0.6
            async with asyncio.TaskGroup() as tasks:
                killed = tasks.create_task(publisher.publish(1))
                while "load 1" not in engine.seen:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                killed.cancel()
        engine.load_s = 0.0
        addresses = [server.address for server in started]
        again = RunIdentity(run_id=RUN.run_id, incarnation=RUN.incarnation + 1)
        resumed = connect(addresses, expected_of(sender.model), again, 10.0, debug=True)
        async with resumed as servers, opened(sender, servers, SETTINGS) as publisher:
            assert publisher.first is not None and len(publisher.first.servers) == 2
            assert servers.num_lost == 0
            assert (await one_response(servers)).versions.per_token().tolist() == [0] * 64


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
        assert response.versions.per_token().tolist() == [3] * 64
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
                on_server=lambda _: None,
            )
            return generated.responses[0]

        async with asyncio.TaskGroup() as tasks:
            responding = tasks.create_task(generate())
            await asyncio.wait_for(arrived.wait(), 5.0)
            await publisher.publish(1)
        versions = (await responding).versions.per_token().tolist()
        assert versions == sorted(versions)
        assert len(versions) == 64


@pytest.mark.report("P52")
async def test_generate_when_a_resumed_run_has_tokens_then_only_the_rest_is_asked_for(tmp_path: Path) -> None:
    """Of one sample all, of one some, of one nothing; each token keeps the version that sampled it."""
    sender = Sender(write_model(tmp_path / "model"), marked_by="version")
    async with publishing(tmp_path, sender, marked_by="version") as (publisher, fleet, started):
        parts = ResponseParts(3, SAMPLING, [begun(0, 64, "length"), begun(1, 10, None)])
        await publisher.publish(1)
        asked = len(started[0].engine.prompts)
        counts: list[int] = []

        async def generate() -> Generated:
            return await fleet.generate(
                PROMPT,
                num_samples=3,
                sampling=SAMPLING,
                deadline_s=10.0,
                on_tokens=counts.append,
                on_server=lambda _: None,
                parts=parts,
            )

        responses = (await generate()).responses
        assert [response.versions.per_token().tolist() for response in responses] == [
            [0] * 64,
            [0] * 10 + [1] * 54,
            [1] * 64,
        ]
        assert [response.behaviour_logprobs[9] for response in responses[:2]] == [-0.5, -0.5]
        assert sorted(map(len, started[0].engine.prompts[asked:])) == [2, 12]
        assert counts[0] > 74 and counts[-1] == parts.num_tokens == 3 * 64
        assert (await generate()).responses[1].versions.per_token().tolist() == [0] * 10 + [1] * 54
        assert len(started[0].engine.prompts) == asked + 2, "nothing was left to ask for"


def begun(sample_index: int, num_tokens: int, finish_reason: FinishReason | None) -> SampleTokens:
    """Under version 0."""
    return SampleTokens(
        sample_index=sample_index,
        token_ids=np.full(num_tokens, 9, dtype=np.int32),
        behaviour_logprobs=np.full(num_tokens, -0.5, dtype=np.float32),
        versions=VersionRuns(((0, num_tokens),)),
        finish_reason=finish_reason,
    )


async def test_generate_when_a_server_has_ended_then_the_error_names_it(tmp_path: Path) -> None:
    sender = Sender(write_model(tmp_path / "model"))
    async with publishing(tmp_path, sender) as (_, fleet, started):
        started[0].stop.received.set()
        await asyncio.sleep(1.5)
        with pytest.raises(FleetUnavailable, match=f"server {started[0].address}: Generate run-1-"):
            await one_response(fleet)
        assert fleet.members[0].outstanding_tokens == 0


@pytest.mark.report("P01")
@pytest.mark.parametrize(("signal_number", "at_most_s"), [(signal.SIGKILL, 4.0), (signal.SIGSTOP, 14.0)])
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
        child_server(["/bin/sh", "-c", f"echo pid $$; {shell}", "sh"], log, 30.0) as server,
        connect([server.address], expected_of(sender.model), RUN, 10.0, debug=True) as fleet,
        open_publisher(
            sender=sender, fleet=fleet, settings=settings, plan=plan(), host="127.0.0.1", version=0
        ) as publisher,
    ):
        pid = int(log.read_text().split()[1])
        sender.delay_s = 0.6
        asyncio.get_running_loop().call_later(0.3, os.kill, pid, signal_number)
        started_s = time.monotonic()
        with pytest.raises(WeightSyncError, match=f"version 1: phase stage: server {server.address}"):
            await publisher.publish(1)
        assert time.monotonic() - started_s < at_most_s
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
