"""One real engine, tied embeddings in float32: sampling, versions, KV, cancellation, and a trainer that dies."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asyppo_async.errors import FleetUnavailable
from asyppo_async.rpc import codec
from asyppo_async.rpc.calls import GenerateCall
from asyppo_async.rpc.client import FleetClient
from asyppo_async.rpc.codec import SampleTokens
from asyppo_async.types import Int32Array, Response, SamplingParams, VersionRuns
from tests.integration.fleet.kept_sets import (
    outside_of_actor,
    sampling_of_preset,
    sets_of_engine,
    sets_of_reference,
)
from tests.integration.service.dashboard import OLD_PROMETHEUS, asked_for, scrape, series_of

FLOOR = 1e-5
IN_FLIGHT_TOLERANCE = 2e-5
DEADLINE_S = 120.0
VOCAB_SIZE = 160
Q_PROJECTION_BYTES = 128 * 128 * 4

pytestmark = pytest.mark.engine


def call_of(run_id: str, prompt: Int32Array, num_samples: int, max_tokens: int, *stop: int) -> GenerateCall:
    sampling = SamplingParams(
        temperature=1.0, top_p=1.0, top_k=0, min_tokens=0, max_tokens=max_tokens, stop_token_ids=stop
    )
    return GenerateCall(
        run_id=run_id,
        incarnation=0,
        request_id="request",
        prompt_id="prompt",
        prompt_token_ids=prompt,
        num_samples=num_samples,
        sampling=sampling,
    )


def prompt_of(num_tokens: int, seed: int = 0) -> Int32Array:
    return np.random.default_rng(seed).integers(2, VOCAB_SIZE, num_tokens, dtype=np.int32)


@pytest.fixture(scope="module")
def folder(make_model) -> Path:
    return make_model(True, "float32")


@pytest.fixture(scope="module")
def server(start_server, folder: Path) -> Iterator[object]:
    # Tokens are handed over late and must not wait for that.
    late = ("--stream-interval", "64", "--chunk-s", "0.1")
    with start_server(
        folder, "--max-num-seqs", "18", "--max-kept-tokens", "128", "--metrics-port", "0", *late
    ) as running:
        yield running


@pytest.fixture
async def client(server) -> AsyncIterator[FleetClient]:
    async with FleetClient(server.address) as client:
        yield client


def largest_gap(reference, prompt: Int32Array, responses: Sequence[Response], version: int) -> float:
    """Over the tokens of one version, between the server's log-probs and the reference's."""
    gaps = []
    for response in responses:
        mine = response.versions.per_token() == version
        theirs = reference.response_logprobs(prompt, response)
        gaps.extend(np.abs(theirs - response.behaviour_logprobs)[mine].tolist())
    assert gaps, f"no token of version {version}"
    return max(gaps)


@pytest.mark.report("P24")
async def test_generation_config_when_hostile_then_has_no_effect(client, folder, open_trainer) -> None:
    """Support, log-probs, length and stops are those of the request: the model's own file has no say."""
    prompt = prompt_of(9)
    async with open_trainer(client, folder, "float32", run_id="hostile") as trainer:
        await trainer.publish(0)
        responses = await client.collect(call_of("hostile", prompt, 16, 200), DEADLINE_S, lambda _: None)
        assert {len(response.token_ids) for response in responses} == {200}
        assert {response.finish_reason for response in responses} == {"length"}
        assert len({int(token) for response in responses for token in response.token_ids}) > VOCAB_SIZE // 2
        assert largest_gap(trainer.reference, prompt, responses, 0) < FLOOR
        stopped = await client.collect(call_of("hostile", prompt, 16, 900, 1, 11), DEADLINE_S, lambda _: None)
        assert {int(response.token_ids[-1]) for response in stopped} <= {1, 11}
        for response in stopped:
            assert not np.isin(response.token_ids[:-1], (1, 11)).any()


async def test_generate_when_a_sample_goes_on_from_its_tokens_then_it_is_one_response_of_the_model(
    client, folder, open_trainer
) -> None:
    """Every log-prob after the seam is that of the whole prefix, as if one server had made it all."""
    prompt = prompt_of(140, seed=3)
    call = call_of("resumed", prompt, 4, 60)
    async with open_trainer(client, folder, "float32", run_id="resumed") as trainer:
        await trainer.publish(0)
        whole = await client.collect(call, DEADLINE_S, lambda _: None)
        begun = tuple(
            SampleTokens(
                sample_index=index,
                token_ids=response.token_ids[: 7 + 16 * index],
                behaviour_logprobs=response.behaviour_logprobs[: 7 + 16 * index],
                versions=VersionRuns.of(response.versions.per_token()[: 7 + 16 * index]),
                finish_reason=None,
            )
            for index, response in enumerate(whole[:3])
        )
        resumed = await client.collect(replace(call, begun=begun), DEADLINE_S, lambda _: None)
        assert [len(response.token_ids) for response in resumed] == [60] * 4
        for sample, response in zip(begun, resumed, strict=False):
            np.testing.assert_array_equal(response.token_ids[: len(sample.token_ids)], sample.token_ids)
        assert largest_gap(trainer.reference, prompt, resumed, 0) < FLOOR


@pytest.mark.parametrize(
    "bucket_bytes",
    [Q_PROJECTION_BYTES // 3, Q_PROJECTION_BYTES, 2**20],
    ids=["below-one-q", "cut-between-q-and-k", "large"],
)
async def test_update_when_buckets_cut_modules_then_gap_stays_at_the_floor(
    client, folder, open_trainer, bucket_bytes: int
) -> None:
    async with open_trainer(
        client, folder, "float32", run_id=f"buckets-{bucket_bytes}", bucket_bytes=bucket_bytes
    ) as trainer:
        for version in range(2):
            trainer.reference.perturb(version, scale=0.05)
            scored, sampled = await trainer.publish(version)
            assert scored.max < FLOOR
            assert sampled.max < FLOOR


@pytest.mark.report("P42")
async def test_update_when_requests_run_then_every_token_has_its_versions_logprob(
    client, folder, open_trainer, make_reference
) -> None:
    """16 running responses, at least 50 tokens of each arrived: log-probs are those of the weights on each span."""
    prompt = prompt_of(40)
    async with open_trainer(client, folder, "float32", run_id="flight") as trainer:
        await trainer.publish(0)
        old, new = trainer.reference, make_reference(folder, "float32")
        new.perturb(1)
        trainer.reference = new
        checksums = await trainer.stage(1)
        arrived = np.zeros(16, dtype=int)
        chunks: list[list[SampleTokens]] = [[] for _ in range(16)]
        async with client.generate(call_of("flight", prompt, 16, 900), DEADLINE_S) as stream:
            async for chunk in stream:
                chunks[chunk.sample_index].append(chunk)
                arrived[chunk.sample_index] += len(chunk.token_ids)
                if checksums and arrived.min() >= 50:
                    await trainer.commit(1, checksums)
                    checksums = ()
                    scored, sampled = await trainer.probe(1)
                    await client.weights.verdict(1, 1, True, DEADLINE_S)
        assert max(scored.max, sampled.max) < FLOOR
    responses = [codec.response_of(each) for each in chunks]
    for response in responses:
        assert len(response.token_ids) == 900
        assert set(response.versions.per_token().tolist()) == {0, 1}
        assert (response.versions.per_token() == 0).sum() >= 50
    assert largest_gap(old, prompt, responses, 0) < IN_FLIGHT_TOLERANCE
    assert largest_gap(new, prompt, responses, 1) < IN_FLIGHT_TOLERANCE
    assert largest_gap(old, prompt, responses, 1) > 0.1  # the update did change the weights


@pytest.mark.report("P19")
@pytest.mark.report("P43")
@pytest.mark.parametrize("kv_on_update", ["keep", "recompute"])
async def test_update_when_requests_wait_then_they_begin_without_old_kv(
    client, folder, open_trainer, kv_on_update: str
) -> None:
    """A prompt of three KV blocks, known to the old weights: samples that waited for the update see nothing old."""
    prompt = prompt_of(3 * 128 + 9)
    run_id = f"wait-{kv_on_update}"
    async with open_trainer(client, folder, "float32", run_id=run_id) as trainer:
        await trainer.publish(0)
        await client.collect(call_of(run_id, prompt, 4, 8), DEADLINE_S, lambda _: None)
        trainer.reference.perturb(1, scale=0.05)
        checksums = await trainer.stage(1)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(
                client.collect(call_of(run_id, prompt, 12, 500), DEADLINE_S, lambda _: None)
            )
            await trainer.commit(1, checksums, kv_on_update)
            waiting = tasks.create_task(
                client.collect(call_of(run_id, prompt, 20, 40), DEADLINE_S, lambda _: None)
            )
            while (await client.info(DEADLINE_S)).num_queued_samples < 20:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await trainer.probe(1)
            await client.weights.verdict(1, 1, True, DEADLINE_S)
    assert {
        version for response in waiting.result() for version in response.versions.per_token().tolist()
    } == {1}
    assert largest_gap(trainer.reference, prompt, waiting.result(), 1) < IN_FLIGHT_TOLERANCE
    for response in running.result():
        assert (np.diff(response.versions.per_token()) >= 0).all()


async def test_generate_when_an_interval_takes_long_then_its_tokens_do_not_wait_for_it(client) -> None:
    call = call_of(*await served_run(client), prompt_of(5), 1, 400)
    async with client.generate(call, DEADLINE_S) as stream:
        sizes = [len(chunk.token_ids) async for chunk in stream]
    assert sizes[0] == 1 and sum(sizes) == 400
    assert any(size % 64 for size in sizes[1:-1]), sizes


@pytest.mark.report("P75")
async def test_generate_when_client_leaves_then_the_engine_is_free_again(client) -> None:
    call = call_of(*await served_run(client), prompt_of(5), 30, 1000)
    async with client.generate(call, DEADLINE_S) as stream:
        await anext(stream)
        info = await client.info(DEADLINE_S)
        assert (info.num_running_samples, info.num_queued_samples) == (16, 14)
    async with asyncio.timeout(2):
        while (await client.info(DEADLINE_S)).num_running_samples:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    # Were a request left in the engine, this one would share its steps and slots with it.
    await client.collect(call_of(*await served_run(client), prompt_of(5), 16, 8), 10.0, lambda _: None)


async def served_run(client: FleetClient) -> tuple[str]:
    return ((await client.info(DEADLINE_S)).run_id,)


@pytest.mark.report("P78")
async def test_replicas_when_the_prompt_is_the_same_then_samples_differ(client) -> None:
    call = call_of(*await served_run(client), prompt_of(5), 16, 20)
    responses = await client.collect(call, DEADLINE_S, lambda _: None)
    assert len({tuple(response.token_ids.tolist()) for response in responses}) == 16


@pytest.mark.parametrize("temperature", [0.6, 1.3])
async def test_logprobs_when_temperature_is_not_1_then_of_the_distribution_sampled_from(
    client, folder, open_trainer, temperature: float
) -> None:
    prompt = prompt_of(7)
    call = call_of("temperature", prompt, 4, 60)
    call = replace(call, sampling=replace(call.sampling, temperature=temperature))
    async with open_trainer(
        client, folder, "float32", run_id="temperature", epoch=round(temperature * 10)
    ) as trainer:
        await trainer.publish(0)
        responses = await client.collect(call, DEADLINE_S, lambda _: None)
        await client.weights.close_session(trainer.epoch, DEADLINE_S)
    for response in responses:
        theirs = trainer.reference.response_logprobs(prompt, response, temperature)
        np.testing.assert_allclose(response.behaviour_logprobs, theirs, atol=FLOOR)


async def test_kept_tokens_when_asked_for_then_they_are_the_sets_that_the_model_was_sampled_from(
    client, folder, open_trainer
) -> None:
    """Two cuts: one of which top-k decides the size, and one of which top-p does."""
    prompt = prompt_of(9)
    async with open_trainer(client, folder, "float32", run_id="kept") as trainer:
        await trainer.publish(0)
        for top_k, top_p in ((5, 0.999), (100, 0.6)):
            call = call_of("kept", prompt, 4, 60)
            call = replace(
                call,
                return_kept_tokens=True,
                sampling=replace(call.sampling, temperature=0.8, top_p=top_p, top_k=top_k),
            )
            for response in await client.collect(call, DEADLINE_S, lambda _: None):
                sets, logprobs, is_clear = sets_of_reference(
                    trainer.reference, prompt, response, call.sampling
                )
                assert response.kept is not None and is_clear.mean() > 0.8
                assert response.kept.counts.tolist() == [len(each) for each in response.kept.sets()]
                pairs = zip(response.kept.sets(), sets, is_clear, strict=True)
                assert [(theirs, ours) for theirs, ours, clear in pairs if clear and theirs != ours] == []
                np.testing.assert_allclose(
                    response.behaviour_logprobs[is_clear], logprobs[is_clear], atol=FLOOR
                )
                sizes = {len(kept) for kept in sets}
                assert sizes == {5} if top_k == 5 else len(sizes) > 5


@pytest.mark.report("P23")
async def test_asyppo_faithful_when_tokens_are_stale_then_the_share_outside_is_that_of_the_engines_own_sets(
    client, folder, open_trainer
) -> None:
    """The paper's sampling: the sets of both ends agree on which tokens older weights made the actor could not have."""
    prompt, sampling = prompt_of(9), sampling_of_preset("asyppo_faithful", max_tokens=40)
    async with open_trainer(client, folder, "float32", run_id="faithful") as trainer:
        await trainer.publish(0)
        call = replace(call_of("faithful", prompt, 4, 40), sampling=sampling, return_kept_tokens=True)
        responses = await client.collect(call, DEADLINE_S, lambda _: None)
        fresh = outside_of_actor(folder, trainer.reference, prompt, responses, sampling)
        trainer.reference.perturb(1)
        await trainer.publish(1)
        sets = [await sets_of_engine(client, call, response, DEADLINE_S) for response in responses]
    stale = outside_of_actor(folder, trainer.reference, prompt, responses, sampling)
    truth = np.array(
        [
            int(token) not in kept
            for response, each in zip(responses, sets, strict=True)
            for token, kept in zip(response.token_ids, each, strict=True)
        ]
    )
    assert (fresh.sum(), len(stale)) == (0, 160)
    assert truth.sum() >= 5, "the weights moved too little to be told apart"
    np.testing.assert_array_equal(stale, truth)


async def test_metrics_when_the_engine_worked_then_the_endpoint_has_what_the_dashboard_asks_for(
    client, server, folder, open_trainer
) -> None:
    """vLLM's own series beside ours, in one scrape, and both have seen the same work."""
    async with open_trainer(client, folder, "float32", run_id="metrics") as trainer:
        await trainer.publish(0)
    await client.collect(call_of("metrics", prompt_of(5), 4, 100), DEADLINE_S, lambda _: None)
    text = await scrape(server.metrics_port)
    wanted = asked_for()
    assert len({name for name in wanted if name.startswith("vllm:")}) >= 4
    assert wanted - series_of(text) == set()
    escaped = {name.replace(":", "_") for name in wanted}
    assert escaped - series_of(await scrape(server.metrics_port, OLD_PROMETHEUS)) == set()
    assert (
        value_of(text, "vllm:generation_tokens_total") >= value_of(text, "asyppo_fleet_tokens_total") >= 400
    )
    assert value_of(text, "vllm:num_requests_running") == 0


def value_of(text: str, series: str) -> float:
    """Of the only series of this name, whatever its labels."""
    (line,) = [line for line in text.splitlines() if re.split(r"[{ ]", line, maxsplit=1)[0] == series]
    return float(line.rsplit(" ", 1)[1])


async def test_port_when_taken_then_one_line_and_exit_code_1(server, folder) -> None:
    script = Path(sys.executable).with_name("asyppo-fleet")
    run = await asyncio.to_thread(
        subprocess.run,
        [str(script), "serve", "--model", str(folder), "--port", str(server.port)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 1
    assert run.stderr.startswith(f"error: cannot listen on 127.0.0.1:{server.port}: Address already in use")
    assert run.stderr.count("\n") == 1


DYING_TRAINER = """
    import asyncio, sys, time
    from pathlib import Path
    import torch
    from asyppo_async.rpc.calls import SessionPlace
    from asyppo_async.rpc.client import FleetClient
    from asyppo_async.weights.manifest import manifest_of_checkpoint
    from asyppo_async.weights.buckets import plan_buckets
    from asyppo_async.weights.store import open_store
    from asyppo_async.weights.transfer import WeightGroup, send_tensors

    async def main(address, folder):
        store, port = open_store("127.0.0.1", 2, 30)
        manifest = manifest_of_checkpoint(Path(folder), "float32")
        place = SessionPlace(run_id="dying", incarnation=0, epoch=1, rank=1, world_size=2, backend="gloo",
                             store_host="127.0.0.1", store_port=port, bucket_bytes=65536, lease_s=5.0)
        async with FleetClient(address) as client:
            def meet():
                return WeightGroup.join(backend="gloo", store=store, rank=0, world_size=2, epoch=1, deadline_s=30)
            _, group = await asyncio.gather(client.weights.open_session(place, manifest, 30), asyncio.to_thread(meet))
            def half_of_it():
                for index, spec in enumerate(manifest.tensors):
                    if index == len(manifest.tensors) // 2:
                        print("in mid-transfer", flush=True)
                        time.sleep(60)
                    yield spec.name, torch.zeros(spec.shape)
            def send():
                send_tensors(group, manifest, plan_buckets(manifest, 65536), half_of_it(), 60)
            await asyncio.gather(client.weights.stage(1, 5, 60), asyncio.to_thread(send))

    asyncio.run(main(*sys.argv[1:]))
"""


async def test_trainer_when_killed_in_mid_transfer_then_the_old_version_serves(
    client, server, folder, open_trainer
) -> None:
    async with open_trainer(client, folder, "float32", run_id="steady") as trainer:
        await trainer.publish(2)
        await client.weights.close_session(1, DEADLINE_S)
    prompt = prompt_of(12)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        textwrap.dedent(DYING_TRAINER),
        server.address,
        str(folder),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        async with asyncio.timeout(90):
            assert process.stdout is not None
            while b"in mid-transfer" not in await process.stdout.readline():
                assert process.returncode is None
        async with client.generate(call_of("steady", prompt, 4, 900), DEADLINE_S) as stream:
            await anext(stream)
            process.send_signal(signal.SIGKILL)
            await process.wait()
            responses = [chunk async for chunk in stream]
        assert {version for chunk in responses for version in chunk.versions.per_token().tolist()} == {2}
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    info = await client.info(DEADLINE_S)
    assert (info.state, info.run_id, info.served_version) == ("serving", "steady", 2)
    again = await client.collect(call_of("steady", prompt, 4, 50), DEADLINE_S, lambda _: None)
    assert largest_gap(trainer.reference, prompt, again, 2) < FLOOR
    async with open_trainer(client, folder, "float32", run_id="steady", epoch=2) as next_trainer:
        scored, _ = await next_trainer.publish(3)
        assert scored.max < FLOOR


async def test_verdict_when_failed_then_running_requests_end_and_a_repeat_heals(
    client, folder, open_trainer
) -> None:
    async with open_trainer(client, folder, "float32", run_id="verdict") as trainer:
        await trainer.publish(0)
        checksums = await trainer.stage(1)
        async with client.generate(call_of("verdict", prompt_of(8), 4, 1000), DEADLINE_S) as stream:
            await anext(stream)
            await trainer.commit(1, checksums)
            await trainer.probe(1)
            await client.weights.verdict(1, 1, False, DEADLINE_S)
            with pytest.raises(FleetUnavailable, match="version 1 failed its probe"):
                async for chunk in stream:
                    assert set(chunk.versions.per_token().tolist()) == {0}
        assert (await client.info(DEADLINE_S)).state == "weights_unknown"
        scored, _ = await trainer.publish(1)
        assert scored.max < FLOOR


async def test_ctrl_c_when_requests_run_then_they_finish_and_the_exit_code_is_0(client, server) -> None:
    """A terminal sends the signal to the engine's processes too. Ends this module's server, so it comes last."""
    run_id = (await client.info(DEADLINE_S)).run_id
    async with asyncio.TaskGroup() as tasks:
        arrived = asyncio.Event()
        collecting = tasks.create_task(
            client.collect(call_of(run_id, prompt_of(5), 8, 900), DEADLINE_S, lambda _: arrived.set())
        )
        await arrived.wait()
        os.killpg(server.process.pid, signal.SIGINT)
    assert [len(response.token_ids) for response in collecting.result()] == [900] * 8
    assert await asyncio.to_thread(server.process.wait, 30) == 0
