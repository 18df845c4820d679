"""The direct way over real gRPC and a real process group: from its begin on nothing is released before a verdict."""

import asyncio

import numpy as np
import pytest
import torch

from asyppo_async.errors import FleetMismatch, FleetUnavailable, WeightSyncError
from asyppo_async.fleet.engine.scripted import MIXTURE, Script
from asyppo_async.types import VersionRuns
from asyppo_async.weights.buckets import plan_buckets
from asyppo_async.weights.transfer import send_tensors
from tests.unit.fleet.conftest import BUCKET_BYTES

DEADLINE_S = 20.0
SLOW = Script(delta_delay_s=0.02)


async def state_of(server) -> tuple[str, int]:
    info = await server.client.info(DEADLINE_S)
    return info.state, info.served_version


async def test_direct_publication_when_samples_run_then_they_go_on_and_never_show_the_mixture(
    serving, sender, draw
) -> None:
    async with serving(SLOW) as server, sender(server, way="direct") as trainer:
        await trainer.publish(1)
        async with server.client.generate(draw("run", max_tokens=100), DEADLINE_S) as stream:
            chunks = [await anext(stream)]
            report = await trainer.stage(2)
            assert await state_of(server) == ("updating", 1)
            await trainer.commit(2, report)
            assert (await trainer.probe(2)).fixed_logprobs[0].tolist() == [-3.0] * 4
            await server.client.weights.verdict(1, 2, True, DEADLINE_S)
            chunks += [chunk async for chunk in stream]
        steps = [
            line.split()[0]
            for line in server.engine.seen
            if not line.startswith(("generate", "score", "abort "))
        ]
        once = ["pause", "begin", "received", "finish", "resume"]
        assert steps == ["join", *once, *once]
        logprobs = np.concatenate([chunk.behaviour_logprobs for chunk in chunks])
        versions = VersionRuns.joined([chunk.versions for chunk in chunks]).per_token()
        assert len(versions) == 100 and set(versions.tolist()) == {1, 2}
        np.testing.assert_allclose(-logprobs - 1 - np.arange(100) / 1000, versions, atol=1e-4)
        assert await state_of(server) == ("serving", 2)
        checksums = await server.client.checksums(DEADLINE_S)
        assert checksums.version == 2 and tuple(checksums.tensors.values()) == report.checksums


@pytest.mark.report("P01")
@pytest.mark.parametrize("point", ["begin", "buckets", "finish", "wire", "verdict"])
async def test_direct_publication_when_it_fails_after_its_begin_then_unknown_until_a_complete_repeat(
    serving, sender, draw, point: str
) -> None:
    async with serving(SLOW) as server:
        async with sender(server, way="direct") as trainer:
            await trainer.publish(1)
            async with server.client.generate(draw("run", max_tokens=400), DEADLINE_S) as stream:
                await anext(stream)
                words = await _fail_at(point, server, trainer)
                with pytest.raises(FleetUnavailable, match=words):
                    async for chunk in stream:
                        assert (chunk.behaviour_logprobs > -MIXTURE).all() and set(
                            chunk.versions.per_token()
                        ) == {1}
            assert await state_of(server) == ("weights_unknown", -1)
            assert await server.client.checksums(DEADLINE_S) is None
            with pytest.raises(FleetMismatch, match="weights unknown"):
                await server.client.collect(draw("run"), DEADLINE_S, lambda _: None)
        async with sender(server, way="direct", epoch=2) as trainer:
            await trainer.publish(2)
        assert await state_of(server) == ("serving", 2)
        (response,) = await server.client.collect(draw("run"), DEADLINE_S, lambda _: None)
        assert set(response.versions.per_token().tolist()) == {2}


async def _fail_at(point: str, server, trainer) -> str:
    """Returns words that the running calls are ended with."""
    if point in ("begin", "buckets"):
        if point == "begin":
            server.engine.faults["begin"] = "no memory left"
        words = "no memory left" if point == "begin" else "receiving bucket 1 of"
        with pytest.raises(FleetUnavailable, match=rf"{words}.*weights unknown until a complete"):
            await server.client.weights.stage(1, 2, 0.5)  # nobody sends
        return f"receiving version 2 failed: .*{words}"
    report = await trainer.stage(2)
    if point == "verdict":
        await trainer.commit(2, report)
        await server.client.weights.verdict(1, 2, False, DEADLINE_S)
        return "version 2 failed its probe"
    if point == "finish":
        server.engine.faults["finish"] = "no memory left"
    checksums = (*report.checksums[:-1], report.checksums[-1] ^ (point == "wire"))
    with pytest.raises(WeightSyncError, match="weights unknown until a complete version"):
        await server.client.weights.commit(1, 2, checksums, "keep", DEADLINE_S)
    return "could not be finished"


@pytest.mark.report("P07")
@pytest.mark.parametrize(
    "point",
    ["before the begin", "first bucket", "mid-bucket", "finish", "probe"],
)
@pytest.mark.parametrize("way", ["staged", "direct"])
async def test_trainer_when_it_is_gone_then_the_update_is_reset_and_the_next_one_is_accepted(
    serving, sender, draw, until, way: str, point: str
) -> None:
    """What a killed trainer leaves: a closed group and no word. Its lease is short here."""
    async with serving() as server:
        async with sender(server, way=way, lease_s=0.3) as trainer:
            await trainer.publish(1)
            await _go_to(point, server, trainer)
        keeps = (way == "staged" and point != "probe") or point == "before the begin"
        expected = ("serving", 1) if keeps else ("weights_unknown", -1)
        if point in ("finish", "probe"):
            await asyncio.sleep(0.5)  # the lease
        async with asyncio.timeout(10):  # what was under way ends at its deadline
            while await state_of(server) != expected:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        if keeps:
            (response,) = await server.client.collect(draw("run", max_tokens=4), DEADLINE_S, lambda _: None)
            assert set(response.versions.per_token().tolist()) == {1}
        if way == "direct" and point == "finish":
            assert "abort update" in server.engine.seen, (
                "the engine has left the update, or the next cannot begin"
            )
        async with sender(server, way=way, run_id="next") as trainer:
            await trainer.publish(0)
        assert await state_of(server) == ("serving", 0)


async def _go_to(point: str, server, trainer) -> None:
    if point == "before the begin":
        return
    if point in ("finish", "probe"):
        report = await trainer.stage(2)
        if point == "probe":
            await trainer.commit(2, report)
        return
    buckets = plan_buckets(server.manifest, BUCKET_BYTES)

    def half_of_it():
        for index, tensor in enumerate(server.manifest.tensors):
            if index == 1:
                raise ConnectionError("killed")
            yield tensor.name, torch.zeros(tensor.shape)

    async with asyncio.TaskGroup() as tasks:
        # Here the sender's sockets outlive it, which those of a killed process do not.
        deadline_s = 1.0 if point == "mid-bucket" else DEADLINE_S
        staging = tasks.create_task(_error_of(server.client.weights.stage(1, 2, deadline_s)))
        if point == "mid-bucket":
            with pytest.raises(ConnectionError):
                await asyncio.to_thread(
                    send_tensors, trainer.group, server.manifest, buckets, half_of_it(), DEADLINE_S
                )
        else:
            await asyncio.sleep(0.1)
        await asyncio.to_thread(trainer.group.close)
    # On a busy machine the client's own patience may end before the server's answer comes.
    assert "receiving bucket" in staging.result() or "Deadline Exceeded" in staging.result()


async def _error_of(call) -> str:
    with pytest.raises(FleetUnavailable) as caught:
        await call
    return str(caught.value)


async def test_open_session_when_a_way_is_unknown_then_refused(serving, sender) -> None:
    async with serving() as server:
        with pytest.raises(ExceptionGroup) as caught:
            async with sender(server, way="pigeon"):
                pass
        assert "a way is one of staged, direct, folder" in str(caught.value.exceptions[0])
