"""Weight updates over real gRPC and a real process group, with faults at every point of them."""

import asyncio

import numpy as np
import pytest

from asyppo_async.errors import FleetMismatch, FleetOverloaded, FleetUnavailable, WeightSyncError
from asyppo_async.fleet.engine.scripted import Script
from asyppo_async.rpc.calls import SessionPlace, Way
from asyppo_async.weights.manifest import Manifest, TensorSpec

DEADLINE_S = 20.0
SLOW = Script(delta_delay_s=0.02)


async def state_of(server) -> tuple[str, str, int]:
    info = await server.client.info(DEADLINE_S)
    return info.state, info.run_id, info.served_version


def nowhere(epoch: int, way: Way = "staged") -> SessionPlace:
    """A session whose sender does not listen."""
    return SessionPlace(
        run_id="run",
        incarnation=0,
        epoch=epoch,
        rank=1,
        world_size=2,
        backend="gloo",
        store_host="127.0.0.1",
        store_port=1,
        bucket_bytes=4096,
        lease_s=5.0,
        way=way,
    )


async def test_publication_when_all_goes_well_then_the_run_is_served(serving, sender, draw) -> None:
    async with serving() as server, sender(server) as trainer:
        assert await state_of(server) == ("serving", "", 0)
        report = await trainer.stage(3)
        await trainer.commit(3, report)
        assert await state_of(server) == ("updating", "", 0)
        probe = await trainer.probe(3)
        assert probe.fixed_logprobs[0].tolist() == [-2.0] * 4
        assert probe.sampled[0].versions.per_token().tolist() == [3] * 8
        await server.client.weights.verdict(1, 3, True, DEADLINE_S)
        assert await state_of(server) == ("serving", "run", 3)
        (response,) = await server.client.collect(draw("run"), DEADLINE_S, lambda _: None)
        assert set(response.versions.per_token().tolist()) == {3}
        await server.client.weights.set_version(1, 4, DEADLINE_S)
        (response,) = await server.client.collect(draw("run"), DEADLINE_S, lambda _: None)
        assert set(response.versions.per_token().tolist()) == {4}
        assert await state_of(server) == ("serving", "run", 4)
        await server.client.weights.close_session(1, DEADLINE_S)
        assert await state_of(server) == ("serving", "run", 4)


@pytest.mark.report("P42")
async def test_commit_when_samples_run_then_new_tokens_are_withheld_until_the_verdict(
    serving, sender, draw, until
) -> None:
    async with serving(SLOW) as server, sender(server) as trainer:
        await trainer.publish(1)
        report = await trainer.stage(2)
        num_seen = 0

        def on_tokens(number: int) -> None:
            nonlocal num_seen
            num_seen = number

        async with asyncio.TaskGroup() as tasks:
            collecting = tasks.create_task(
                server.client.collect(draw("run", max_tokens=300), DEADLINE_S, on_tokens)
            )
            await until(lambda: num_seen >= 20)
            await trainer.commit(2, report)
            await asyncio.sleep(0.5)  # what was released before stays a twentieth of that in the client
            num_released = num_seen
            await trainer.probe(2)
            await asyncio.sleep(0.2)
            assert num_seen == num_released
            await server.client.weights.verdict(1, 2, True, DEADLINE_S)
        (response,) = collecting.result()
    boundary = int((response.versions.per_token() == 1).sum())
    assert boundary == num_released
    assert (response.versions.per_token()[boundary:] == 2).all()
    loads = -response.behaviour_logprobs - 1 - np.arange(300) / 1000
    np.testing.assert_allclose(loads, response.versions.per_token(), atol=1e-4)


async def test_commit_when_the_same_version_is_sent_again_then_it_is_on_probation_too(
    serving, sender, draw
) -> None:
    async with serving(SLOW) as server, sender(server) as trainer:
        await trainer.publish(1)
        report = await trainer.stage(1)
        async with server.client.generate(draw("run", max_tokens=400), DEADLINE_S) as stream:
            await anext(stream)
            await trainer.commit(1, report)
            await asyncio.sleep(0.1)
            await server.client.weights.verdict(1, 1, False, DEADLINE_S)
            with pytest.raises(FleetUnavailable):
                async for chunk in stream:
                    assert (chunk.behaviour_logprobs > -3).all()  # of the first load


async def test_verdict_when_failed_then_withheld_tokens_are_discarded(serving, sender, draw, until) -> None:
    async with serving(SLOW) as server, sender(server) as trainer:
        await trainer.publish(1)
        report = await trainer.stage(2)
        async with server.client.generate(draw("run", max_tokens=400), DEADLINE_S) as stream:
            await anext(stream)
            await trainer.commit(2, report)
            await asyncio.sleep(0.1)
            await server.client.weights.verdict(1, 2, False, DEADLINE_S)
            versions = set()
            with pytest.raises(FleetUnavailable, match="version 2 failed its probe"):
                async for chunk in stream:
                    versions.update(chunk.versions.per_token().tolist())
        assert versions <= {1}
        await until(lambda: not server.engine.running_ids)
        assert await state_of(server) == ("weights_unknown", "", -1)
        with pytest.raises(FleetMismatch, match="weights unknown"):
            await server.client.collect(draw("run"), DEADLINE_S, lambda _: None)
        await trainer.publish(2)
        (response,) = await server.client.collect(draw("run"), DEADLINE_S, lambda _: None)
        assert set(response.versions.per_token().tolist()) == {2}


async def test_commit_when_a_sample_has_not_begun_then_it_begins_under_the_new_weights(
    serving, sender, draw, until
) -> None:
    """A first token that takes long: handed over before the pause, sampled after it."""
    async with serving(Script(delta_delay_s=0.4)) as server, sender(server) as trainer:
        await trainer.publish(1)
        report = await trainer.stage(2)
        async with asyncio.TaskGroup() as tasks:
            collecting = tasks.create_task(
                server.client.collect(draw("run", num_samples=2, max_tokens=4), DEADLINE_S, lambda _: None)
            )
            await until(lambda: len(server.engine.running_ids) == 2)
            before = [line for line in server.engine.seen if line.startswith("generate sample")]
            await trainer.commit(2, report)
            await server.client.weights.verdict(1, 2, True, DEADLINE_S)
        again = [line for line in server.engine.seen if line.startswith("generate sample")][len(before) :]
    assert {line.split()[2] for line in before} == {"load-1"}
    assert [line.split()[2] for line in again] == ["load-2", "load-2"]
    for response in collecting.result():
        assert set(response.versions.per_token().tolist()) == {2}


@pytest.mark.report("P19")
async def test_commit_when_a_sample_begins_before_the_load_then_it_has_the_salt_of_the_old_weights(
    serving, sender, draw, until
) -> None:
    """Or its KV, made by the old weights, would be found by those that begin under the new ones."""
    async with serving(Script(verify_s=0.3)) as server, sender(server) as trainer:
        await trainer.publish(1)
        report = await trainer.stage(2)
        num_seen = len(server.engine.seen)
        async with asyncio.TaskGroup() as tasks:
            committing = tasks.create_task(trainer.commit(2, report))
            await until(lambda: "verify" in server.engine.seen[num_seen:])
            await server.client.collect(draw("run", max_tokens=4), DEADLINE_S, lambda _: None)
            assert not committing.done()
        handed_over = [line for line in server.engine.seen[num_seen:] if line.startswith("generate sample")]
        assert [line.split()[2] for line in handed_over] == ["load-1"]


@pytest.mark.parametrize("kind", ["wire", "verify"])
async def test_commit_when_bytes_are_wrong_then_old_version_serves(serving, sender, draw, kind: str) -> None:
    async with serving() as server, sender(server) as trainer:
        await trainer.publish(1)
        report = await trainer.stage(2)
        if kind == "verify":
            server.engine.faults["verify"] = "checksum of lm_head.weight differs"
            checksums = report.checksums
        else:
            checksums = (*report.checksums[:-1], report.checksums[-1] ^ 1)
        with pytest.raises(WeightSyncError, match=r"lm_head|embed_tokens|up_proj"):
            await server.client.weights.commit(1, 2, checksums, "keep", DEADLINE_S)
        assert "load 2" not in server.engine.seen
        assert await state_of(server) == ("serving", "run", 1)
        await server.client.collect(draw("run"), DEADLINE_S, lambda _: None)
        await trainer.publish(2)
        assert await state_of(server) == ("serving", "run", 2)


@pytest.mark.parametrize("point", ["pause", "load", "resume"])
async def test_commit_when_the_engine_fails_then_weights_unknown_until_repeated(
    serving, sender, draw, point: str
) -> None:
    async with serving(SLOW) as server, sender(server) as trainer:
        await trainer.publish(1)
        report = await trainer.stage(2)
        async with server.client.generate(draw("run", max_tokens=400), DEADLINE_S) as stream:
            await anext(stream)
            server.engine.faults[point] = "no memory left"
            with pytest.raises(FleetUnavailable, match=r"no memory left.*weights unknown"):
                await trainer.commit(2, report)
            with pytest.raises(FleetUnavailable, match="no memory left"):
                async for _ in stream:
                    pass
        assert (await state_of(server))[0] == "weights_unknown"
        await trainer.publish(2)
        assert await state_of(server) == ("serving", "run", 2)


async def test_stage_when_the_sender_dies_then_old_version_serves_and_a_new_session_works(
    serving, sender, draw
) -> None:
    async with serving() as server:
        async with sender(server) as trainer:
            await trainer.publish(1)
            async with asyncio.TaskGroup() as tasks:
                staging = tasks.create_task(_stage_error(server, 2))
                await asyncio.sleep(0.1)
                assert await state_of(server) == ("serving", "run", 1)
                await asyncio.to_thread(trainer.group.close)
            assert "receiving bucket" in staging.result()
        assert await state_of(server) == ("serving", "run", 1)
        await server.client.collect(draw("run"), DEADLINE_S, lambda _: None)
        async with sender(server, epoch=2) as trainer:
            await trainer.publish(2)
        assert await state_of(server) == ("serving", "run", 2)


async def _stage_error(server, version: int) -> str:
    with pytest.raises(FleetUnavailable) as caught:
        await server.client.weights.stage(1, version, DEADLINE_S)
    return str(caught.value)


async def test_stage_when_the_sender_is_silent_then_the_deadline_ends_it(serving, sender) -> None:
    async with serving() as server, sender(server):
        started_s = asyncio.get_running_loop().time()
        with pytest.raises(FleetUnavailable, match="receiving bucket"):
            await server.client.weights.stage(1, 1, 0.5)
        assert asyncio.get_running_loop().time() - started_s < 5
        assert await state_of(server) == ("serving", "", 0)


@pytest.mark.parametrize(("committed", "expected"), [(False, "serving"), (True, "weights_unknown")])
async def test_lease_when_the_trainer_is_silent_then_the_update_is_reset(
    serving, sender, draw, committed: bool, expected: str
) -> None:
    async with serving(Script(delta_delay_s=0.05)) as server, sender(server, lease_s=1.0) as trainer:
        async with server.client.generate(draw(max_tokens=400), DEADLINE_S) as stream:
            await anext(stream)
            report = await trainer.stage(1)
            if committed:
                await trainer.commit(1, report)
            await asyncio.sleep(1.6)
            assert (await state_of(server))[0] == expected
            if not committed:
                await anext(stream)
        with pytest.raises(FleetMismatch, match="no weight session is open"):
            await server.client.weights.verdict(1, 1, True, DEADLINE_S)


async def test_lease_when_a_call_is_under_way_then_it_does_not_end(serving, sender) -> None:
    async with serving() as server, sender(server, lease_s=1.0) as trainer:
        report = await trainer.stage(1)
        for _ in range(4):
            await asyncio.sleep(0.4)
            with pytest.raises(FleetMismatch):
                await server.client.weights.commit(1, 9, report.checksums, "keep", DEADLINE_S)
        await trainer.commit(1, report)


@pytest.mark.report("P18")
async def test_open_when_manifests_differ_then_refused_with_the_tensors(serving) -> None:
    async with serving() as server:
        wrong = Manifest(
            tensors=(
                *server.manifest.tensors[1:],
                TensorSpec(name="model.extra.weight", shape=(2, 2), dtype="float32"),
            )
        )
        missing = server.manifest.tensors[0].name
        with pytest.raises(FleetMismatch, match=rf"missing: {missing}.*unexpected: model.extra.weight"):
            await server.client.weights.open_session(nowhere(epoch=1), wrong, DEADLINE_S)


async def test_open_when_a_second_run_publishes_then_calls_of_the_first_end(serving, sender, draw) -> None:
    async with serving(SLOW) as server:
        async with sender(server, run_id="first") as trainer:
            await trainer.publish(7)
            await server.client.weights.close_session(1, DEADLINE_S)
        async with (
            sender(server, run_id="second") as trainer,
            server.client.generate(draw("first", max_tokens=400), DEADLINE_S) as stream,
        ):
            await anext(stream)
            await trainer.publish(0)
            with pytest.raises(FleetUnavailable, match="another run"):
                async for chunk in stream:
                    assert set(chunk.versions.per_token().tolist()) == {7}
            assert await state_of(server) == ("serving", "second", 0)


async def test_probe_when_all_other_slots_are_taken_then_answered(serving, sender, draw, until) -> None:
    async with (
        serving(Script(delta_delay_s=0.02), max_num_seqs=4, probe_slots=1) as server,
        sender(server) as trainer,
    ):
        await trainer.publish(1)
        async with server.client.generate(draw("run", num_samples=9, max_tokens=400), DEADLINE_S) as stream:
            await anext(stream)
            await until(lambda: len(server.engine.running_ids) == 3)
            await trainer.commit(2, await trainer.stage(2))
            await trainer.probe(2)
            assert server.engine.max_running <= 4


@pytest.mark.report("P46")
async def test_open_when_a_dead_trainers_load_is_under_way_then_it_waits_for_its_end(
    serving, sender, until
) -> None:
    async with serving(Script(load_s=1.0)) as server:
        async with sender(server) as trainer:
            report = await trainer.stage(1)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await trainer.commit(1, report)
        assert server.engine.seen[-1] == "load 1", "the load goes on without its trainer"
        async with sender(server, incarnation=1) as trainer:
            assert "resume" in server.engine.seen
            assert await state_of(server) == ("weights_unknown", "", -1)
            await trainer.publish(0)
        assert await state_of(server) == ("serving", "run", 0)


async def test_open_when_the_load_does_not_end_then_refused_within_half_the_deadline(serving, sender) -> None:
    async with serving(Script(load_s=1.5)) as server, sender(server) as trainer:
        report = await trainer.stage(1)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(trainer.commit(1, report))
            await asyncio.sleep(0.1)
            with pytest.raises(FleetOverloaded, match="a load is under way; open the session again"):
                async with asyncio.timeout(1.0):
                    await server.client.weights.open_session(nowhere(epoch=2), server.manifest, 1.2)


async def test_commit_when_the_caller_goes_away_then_it_still_ends(serving, sender, until) -> None:
    async with serving(Script(load_s=1.0)) as server, sender(server, lease_s=1.0) as trainer:
        report = await trainer.stage(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await trainer.commit(1, report)
        assert "resume" not in server.engine.seen
        await until(lambda: "resume" in server.engine.seen)
        assert await state_of(server) == ("updating", "", 0)
        await asyncio.sleep(1.5)
        assert await state_of(server) == ("weights_unknown", "", -1)
