"""One real engine whose versions are adapters: loaded at a version boundary, probed, refused in time."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asyppo_async.errors import FleetMismatch, RequestRejected, WeightSyncError
from asyppo_async.rpc import codec
from asyppo_async.rpc.calls import SessionPlace
from asyppo_async.rpc.client import FleetClient
from asyppo_async.rpc.codec import SampleTokens
from asyppo_async.weights.host_copy import HostCopy
from asyppo_async.weights.manifest import Manifest, TensorSpec
from tests.integration.fleet.adapters import AdapterReference
from tests.integration.fleet.conftest import DEADLINE_S, Reference, call_of, sampling_of
from tests.integration.fleet.test_float32_tied import largest_gap, prompt_of

FLOOR = 5e-5
"""Of float32: the engine adds the adapter's product, the reference its sum with the weight."""

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(make_model) -> Path:
    return make_model(True, "float32")


@pytest.fixture(scope="module")
def server(start_server, folder: Path) -> Iterator[object]:
    with start_server(folder, "--max-num-seqs", "18", "--enable-lora", "--max-lora-rank", "8") as running:
        yield running


@pytest.fixture
async def client(server) -> AsyncIterator[FleetClient]:
    async with FleetClient(server.address) as client:
        yield client


@pytest.fixture
def reference(folder: Path, tmp_path: Path) -> AdapterReference:
    return AdapterReference(folder, tmp_path)


async def test_server_when_nothing_was_published_then_it_is_the_model_without_adapter(client, folder) -> None:
    """Must run first: later the server has an adapter."""
    prompt = prompt_of(9)
    call = call_of("", prompt, 4, sampling_of(40))
    responses = await client.collect(call, DEADLINE_S, lambda _: None)
    assert largest_gap(Reference(folder, "float32"), prompt, responses, 0) < FLOOR


@pytest.mark.report("P84")
async def test_adapter_when_published_beside_requests_then_every_token_is_of_its_versions_adapter(
    client, folder, open_trainer, reference: AdapterReference, tmp_path: Path
) -> None:
    prompt = prompt_of(40)
    async with open_trainer(client, folder, "float32", run_id="flight", reference=reference) as trainer:
        scored, sampled = await trainer.publish(0)
        assert max(scored.max, sampled.max) < FLOOR
        old, new = reference, AdapterReference(folder, tmp_path / "new")
        new.learn(1)
        trainer.reference = new
        checksums = await trainer.stage(1)
        arrived = np.zeros(8, dtype=int)
        chunks: list[list[SampleTokens]] = [[] for _ in range(8)]
        async with client.generate(call_of("flight", prompt, 8, sampling_of(900)), DEADLINE_S) as stream:
            async for chunk in stream:
                chunks[chunk.sample_index].append(chunk)
                arrived[chunk.sample_index] += len(chunk.token_ids)
                if checksums and arrived.min() >= 50:
                    await trainer.commit(1, checksums)
                    checksums = ()
                    scored, sampled = await trainer.probe(1)
                    await client.weights.verdict(1, 1, True, DEADLINE_S)
        told = await client.checksums(DEADLINE_S)
    assert max(scored.max, sampled.max) < FLOOR
    responses = [codec.response_of(each) for each in chunks]
    assert {version for response in responses for version in response.versions.per_token().tolist()} == {0, 1}
    assert largest_gap(old, prompt, responses, 0) < FLOOR
    assert largest_gap(new, prompt, responses, 1) < FLOOR
    assert largest_gap(old, prompt, responses, 1) > 0.1, "the adapters differ"
    assert told is not None and (told.version, len(told.tensors)) == (1, len(reference.manifest.tensors))


async def test_adapter_when_a_part_of_it_changes_then_a_delta_carries_it(
    client, folder, open_trainer, reference: AdapterReference
) -> None:
    async with open_trainer(client, folder, "float32", run_id="delta", reference=reference) as trainer:
        copy = HostCopy.empty(trainer.manifest)
        copy.hold(0, trainer.tensors())
        await trainer.publish(0)
        reference.learn(2)
        await trainer.stage_delta(1, copy)
        await trainer.commit(1, copy.checksums)
        scored, sampled = await trainer.probe(1)
        assert max(scored.max, sampled.max) < FLOOR
        await client.weights.verdict(trainer.epoch, 1, True, DEADLINE_S)


async def test_adapter_when_its_bytes_are_not_those_sent_then_the_one_before_goes_on_serving(
    client, folder, open_trainer, reference: AdapterReference
) -> None:
    prompt = prompt_of(12)
    async with open_trainer(client, folder, "float32", run_id="wrong", reference=reference) as trainer:
        await trainer.publish(0)
        checksums = await trainer.stage(1)
        with pytest.raises(WeightSyncError, match="goes on serving"):
            await trainer.commit(1, (checksums[0] ^ 1, *checksums[1:]))
        responses = await client.collect(
            call_of("wrong", prompt, 2, sampling_of(30)), DEADLINE_S, lambda _: None
        )
        assert largest_gap(reference, prompt, responses, 0) < FLOOR


async def test_adapter_when_its_probe_failed_then_nothing_is_served_until_another_has_passed(
    client, folder, open_trainer, reference: AdapterReference
) -> None:
    call = call_of("verdict", prompt_of(8), 2, sampling_of(20))
    async with open_trainer(client, folder, "float32", run_id="verdict", reference=reference) as trainer:
        await trainer.publish(0)
        await trainer.commit(1, await trainer.stage(1))
        await client.weights.verdict(1, 1, False, DEADLINE_S)
        assert (await client.info(DEADLINE_S)).state == "weights_unknown"
        with pytest.raises(FleetMismatch, match="weights unknown"):
            await client.collect(call, 5.0, lambda _: None)
        reference.learn(3)
        scored, _ = await trainer.publish(1)
        assert scored.max < FLOOR


async def test_session_when_it_carries_what_no_adapter_is_then_refused_with_the_reason(
    client, folder, reference: AdapterReference, tmp_path: Path
) -> None:
    """When the session is opened: what the engine has is untouched, and goes on."""
    place = SessionPlace(
        run_id="misfit",
        incarnation=0,
        epoch=1,
        rank=1,
        world_size=2,
        backend="gloo",
        store_host="127.0.0.1",
        store_port=1,
        bucket_bytes=2**20,
        lease_s=30.0,
        way="folder",
        folder=str(tmp_path),
    )
    before = (await client.info(DEADLINE_S)).state
    first, second, *others = reference.manifest.tensors
    wide = replace(first, shape=(16, first.shape[1])), replace(second, shape=(second.shape[0], 16))
    head = TensorSpec(name="base_model.model.lm_head.lora_A.weight", shape=(4, 128), dtype="float32")
    wrong = {
        "an adapter has one rank": (*wide, *others),
        "ranks 1 to 8 are served": wide,
        "lora_B.weight is missing": (first, *others),
        "no linear layer lm_head": (first, second, *others, head),
        "is no tensor of an adapter": Reference(folder, "float32").manifest.tensors,
    }
    for words, tensors in wrong.items():
        with pytest.raises(FleetMismatch, match=words):
            await client.weights.open_session(place, Manifest(tensors=tensors), DEADLINE_S)
    with pytest.raises(RequestRejected, match="use the way staged or folder"):
        await client.weights.open_session(replace(place, way="direct"), reference.manifest, DEADLINE_S)
    assert (await client.info(DEADLINE_S)).state == before
