"""A server under clients that come, go, cancel and stall, for `ASYPPO_SOAK_S` seconds (twenty minutes)."""

import asyncio
import contextlib
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import numpy as np
import psutil
import pytest

from asyppo_async.rpc.calls import GenerateCall
from asyppo_async.rpc.client import FleetClient
from tests.integration.fleet.conftest import (
    VOCAB_SIZE,
    MakeModel,
    OpenTrainer,
    ServerProcess,
    StartServer,
    call_of,
    sampling_of,
)

SOAK_S = float(os.environ.get("ASYPPO_SOAK_S", "1200"))
DEADLINE_S = 600.0
MEMORY_EVERY_S = 1.0
GROWTH = 0.03

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(SOAK_S + 300)]


class Soak:
    """Clients that ask until the time is over, and what became of what they asked for."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.ends_at_s = time.monotonic() + SOAK_S
        self.counts: Counter[str] = Counter()
        self.memory_bytes: list[int] = []

    async def steady(self, client: FleetClient, chance: random.Random) -> None:
        """Waits for everything."""
        call = self._call(chance, max_tokens=chance.randrange(1, 200))
        self._check(call, await client.collect(call, DEADLINE_S, lambda _: None))

    async def stalling(self, client: FleetClient, chance: random.Random) -> None:
        """Leaves a stream unread for seconds, and then wants the rest of it."""
        call = self._call(chance, max_tokens=200)
        num_tokens = 0
        async with client.generate(call, DEADLINE_S) as stream:
            async for chunk in stream:
                num_tokens += len(chunk.token_ids)
                if chance.random() < 0.1:
                    await asyncio.sleep(chance.uniform(0.5, 4))
        assert num_tokens == call.num_samples * call.sampling.max_tokens
        self.counts["tokens"] += num_tokens

    async def cancelling(self, client: FleetClient, chance: random.Random) -> None:
        """Loses interest at any moment."""
        call = self._call(chance, max_tokens=400)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(chance.uniform(0, 0.5)):
                await client.collect(call, DEADLINE_S, lambda _: None)

    async def leaving(self, _: FleetClient, chance: random.Random) -> None:
        """Goes away with its whole connection, in the middle of a stream."""
        call = self._call(chance, max_tokens=400)
        async with FleetClient(self.server.address) as own, own.generate(call, DEADLINE_S) as stream:
            await anext(stream)

    async def keep(
        self, client: FleetClient, visit: Callable[[FleetClient, random.Random], Awaitable[None]], seed: int
    ) -> None:
        chance = random.Random(seed)
        while time.monotonic() < self.ends_at_s:
            await visit(client, chance)
            self.counts[visit.__name__] += 1

    async def watch_memory(self) -> None:
        while True:
            await asyncio.sleep(MEMORY_EVERY_S)
            held = 0
            for pid in (self.server.process.pid, *self.server.descendants()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    held += psutil.Process(pid).memory_info().rss
            self.memory_bytes.append(held)

    def _call(self, chance: random.Random, *, max_tokens: int) -> GenerateCall:
        prompt = np.array([chance.randrange(2, VOCAB_SIZE) for _ in range(chance.randrange(1, 40))], np.int32)
        return call_of("soak", prompt, chance.randrange(1, 9), sampling_of(max_tokens))

    def _check(self, call: GenerateCall, responses: tuple) -> None:  # type: ignore[type-arg]
        assert len(responses) == call.num_samples
        for response in responses:
            assert len(response.token_ids) == call.sampling.max_tokens
            assert np.isfinite(response.behaviour_logprobs).all()
            self.counts["tokens"] += len(response.token_ids)


async def test_server_when_clients_come_go_cancel_and_stall_stays_as_it_was(
    make_model: MakeModel,
    start_server: StartServer,
    open_trainer: OpenTrainer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = make_model(True, "float32")
    with start_server(folder, "--max-num-seqs", "64") as server:
        async with FleetClient(server.address) as client:
            async with open_trainer(client, folder, "float32", run_id="soak") as trainer:
                await trainer.publish(0)
            soak = Soak(server)
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(soak.watch_memory())
                visits = [soak.steady] * 6 + [soak.stalling] * 2 + [soak.cancelling] * 4 + [soak.leaving] * 2
                visitors = [
                    tasks.create_task(soak.keep(client, visit, seed)) for seed, visit in enumerate(visits)
                ]
                await asyncio.wait(visitors)
                watching.cancel()
            async with asyncio.timeout(10):
                while True:
                    info = await client.info(DEADLINE_S)
                    if (
                        info.kv_cache_usage == 0
                        and not info.num_running_samples
                        and not info.num_queued_samples
                    ):
                        break
                    await asyncio.sleep(0.1)
        fifth = len(soak.memory_bytes) // 5
        early, late = (
            statistics.median(part)
            for part in (soak.memory_bytes[fifth : 2 * fifth], soak.memory_bytes[-fifth:])
        )
        with capsys.disabled():
            print(
                f"\n{SOAK_S:.0f} s: {dict(soak.counts)}; memory of the server {early / 2**20:.0f} MiB in the second "
                f"fifth, {late / 2**20:.0f} MiB in the last"
            )
        assert late < (1 + GROWTH) * early
        assert min(soak.counts[visit.__name__] for visit in set(visits)) > SOAK_S / 30
