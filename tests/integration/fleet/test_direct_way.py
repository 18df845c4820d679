"""The direct way into a real engine: its worker is a rank of the trainer's session and loads buckets as they arrive."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from asyppo_async.errors import FleetMismatch, FleetUnavailable, WeightSyncError
from asyppo_async.rpc.client import FleetClient
from asyppo_async.weights.buckets import plan_buckets
from asyppo_async.weights.probe import long_sequence
from asyppo_async.weights.transfer import send_tensors
from tests.integration.fleet.conftest import (
    DEADLINE_S,
    KV_BYTES_PER_TOKEN,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    Trainer,
    call_of,
    sampling_of,
)
from tests.integration.fleet.sharpness import bound_of, gaps_with_one_scaled, one_of_each_kind

FLOOR = 1e-5
PROMPT = np.arange(3, 20, dtype=np.int32)
KV_GIB = str(5120 * KV_BYTES_PER_TOKEN / 2**30)
"""Five sequences of full length: eight running ones have to give way to one another."""

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def folder(make_model) -> Path:
    return make_model(True, "float32")


@pytest.fixture(scope="module")
def server(start_server, folder: Path) -> Iterator[object]:
    with start_server(folder, "--max-num-seqs", "10", "--kv-cache-gib", KV_GIB) as running:
        yield running


@pytest.fixture
async def client(server) -> AsyncIterator[FleetClient]:
    async with FleetClient(server.address) as client:
        yield client


@contextlib.asynccontextmanager
async def requests_beside(client: FleetClient, run_id: str) -> AsyncIterator[list[set[int]]]:
    """Eight responses run at any time, however long the block takes, in two calls that do not end together.

    Yields the versions of each call, which are there when the block has been left.
    """
    seen: list[set[int]] = []
    started = [asyncio.Event(), asyncio.Event()]
    left = asyncio.Event()

    async def one_after_another(num_tokens: int, first: asyncio.Event) -> None:
        while not left.is_set():
            versions: set[int] = set()
            async with client.generate(
                call_of(run_id, PROMPT, 4, sampling_of(num_tokens)), DEADLINE_S
            ) as stream:
                async for chunk in stream:
                    first.set()
                    versions |= set(chunk.versions.per_token().tolist())
            seen.append(versions)

    async with asyncio.TaskGroup() as tasks:
        for num_tokens, first in zip((900, 620), started, strict=True):
            tasks.create_task(one_after_another(num_tokens, first))
        for first in started:
            await first.wait()
        yield seen
        left.set()


async def until_kv_is_full(client: FleetClient) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (await client.info(DEADLINE_S)).kv_cache_usage < 0.95:  # noqa: ASYNC110  another process
            await asyncio.sleep(0.05)


async def state_of(client: FleetClient) -> str:
    return (await client.info(DEADLINE_S)).state


@pytest.mark.parametrize("bucket_bytes", [20_000, 2**20])
async def test_direct_when_requests_run_then_they_go_on_under_the_new_weights(
    client, folder, open_trainer, bucket_bytes: int
) -> None:
    run_id = f"direct-{bucket_bytes}"
    async with open_trainer(
        client, folder, "float32", run_id=run_id, way="direct", bucket_bytes=bucket_bytes
    ) as trainer:
        await trainer.publish(0)
        trainer.reference.perturb(1)
        async with requests_beside(client, run_id) as seen:
            scored, sampled = await trainer.publish(1)
        assert max(scored.max, sampled.max) < FLOOR
        assert {0, 1} in seen
        checksums = await client.checksums(DEADLINE_S)
        assert checksums is not None and len(checksums.tensors) == len(trainer.manifest.tensors)


async def test_probe_when_running_requests_hold_all_kv_then_a_sequence_that_fills_the_model_is_scored(
    client, folder, open_trainer
) -> None:
    """One place is left to the token that an engine generates with a prompt's log-probs."""
    long = long_sequence(0, VOCAB_SIZE, MAX_MODEL_LEN - 1)
    async with open_trainer(client, folder, "float32", run_id="long") as trainer:
        await trainer.publish(0)
        trainer.reference.perturb(4)
        async with requests_beside(client, "long") as seen:  # in every slot that the probe leaves
            await until_kv_is_full(client)
            await trainer.commit(1, await trainer.stage(1))
            scored, _ = await trainer.probe(1, long=[long])
            assert scored.num_tokens == 1 + 16 + 128 + len(long) - 1
            assert scored.max < FLOOR
            await client.weights.verdict(trainer.epoch, 1, True, DEADLINE_S)
        assert {0, 1} in seen


@pytest.mark.report("P07")
@pytest.mark.parametrize(
    "point",
    [
        "silence",
        pytest.param("buckets", marks=pytest.mark.long),
        pytest.param("finish", marks=pytest.mark.long),
    ],
)
async def test_direct_when_it_breaks_after_its_begin_then_the_next_trainer_heals_it(
    client, folder, open_trainer, point: str
) -> None:
    lease_s = 3.0 if point == "silence" else 30.0
    async with open_trainer(
        client, folder, "float32", run_id=f"broken-{point}", way="direct", lease_s=lease_s
    ) as trainer:
        await trainer.publish(0)
        trainer.reference.perturb(2)
        call = call_of(trainer.run_id, PROMPT, 4, sampling_of(1000))
        async with client.generate(call, DEADLINE_S) as stream:
            await anext(stream)
            await _break(point, trainer)
            with pytest.raises(FleetUnavailable, match="weights unknown"):
                async for chunk in stream:
                    assert set(chunk.versions.per_token().tolist()) == {0}
    assert await state_of(client) == "weights_unknown"
    with pytest.raises(FleetMismatch, match="weights unknown"):
        await client.collect(call, DEADLINE_S, lambda _: None)
    async with open_trainer(client, folder, "float32", run_id=f"healed-{point}", way="direct") as trainer:
        trainer.reference.perturb(3)
        scored, sampled = await trainer.publish(0)
        assert max(scored.max, sampled.max) < FLOOR
    assert await state_of(client) == "serving"


async def _break(point: str, trainer: Trainer) -> None:
    if point == "silence":
        await trainer.stage(1)
        await asyncio.sleep(3.5)  # the lease
        return
    if point == "finish":
        checksums = await trainer.stage(1)
        with pytest.raises(WeightSyncError, match=r"checksum of .* sent.*weights unknown"):
            await trainer.commit(1, (*checksums[:-1], checksums[-1] ^ 1))
        return
    buckets = plan_buckets(trainer.manifest, trainer.bucket_bytes)

    def half_of_it() -> Iterator[tuple[str, torch.Tensor]]:
        tensors = trainer.tensors()
        yield from tensors[: len(tensors) // 2]
        trainer.group.close()
        raise ConnectionError("the trainer is gone")

    async with asyncio.TaskGroup() as tasks:
        staging = tasks.create_task(_error_of(trainer.client.weights.stage(1, 1, 5.0)))
        with contextlib.suppress(ConnectionError, WeightSyncError):
            await asyncio.to_thread(
                send_tensors, trainer.group, trainer.manifest, buckets, half_of_it(), DEADLINE_S
            )
    assert "receiving bucket" in staging.result()


async def _error_of(call) -> str:
    with pytest.raises(FleetUnavailable) as caught:
        await call
    return str(caught.value)


@pytest.mark.report("P14")
async def test_probe_when_a_tensor_of_any_kind_is_wrong_then_it_fails(client, folder, open_trainer) -> None:
    async with open_trainer(client, folder, "float32", run_id="sharp") as trainer:
        bound = await bound_of(trainer)
        names = one_of_each_kind([spec.name for spec in trainer.manifest.tensors])
        gaps = {name: gap async for name, gap in gaps_with_one_scaled(trainer, names)}
        assert len(gaps) == 24
        assert [name for name, gap in gaps.items() if gap <= bound] == []


@pytest.mark.report("P21")
@pytest.mark.report("P15")
@pytest.mark.parametrize(
    "count", [20, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
async def test_publications_when_nothing_was_learned_then_the_server_never_changes(
    client, folder, open_trainer, count: int
) -> None:
    """The soak at a learning rate of zero: probe gap, checksums and greedy output stay what they were."""
    greedy = call_of(f"soak-{count}", PROMPT, 1, sampling_of(64, temperature=0.0))
    largest = 0.0
    async with open_trainer(
        client, folder, "float32", run_id=f"soak-{count}", bucket_bytes=20_000
    ) as trainer:
        await trainer.publish(0)
        (before,) = await client.collect(greedy, DEADLINE_S, lambda _: None)
        sums = await client.checksums(DEADLINE_S)
        for version in range(1, count + 1):
            scored, sampled = await trainer.publish(version)
            largest = max(largest, scored.max, sampled.max)
            assert largest < FLOOR
            (after,) = await client.collect(greedy, DEADLINE_S, lambda _: None)
            assert after.token_ids.tolist() == before.token_ids.tolist()
            assert (after.behaviour_logprobs == before.behaviour_logprobs).all()
        again = await client.checksums(DEADLINE_S)
        assert sums is not None and again is not None and again.tensors == sums.tensors
        print(f"{count} publications: largest gap {largest:.2e} nats")
