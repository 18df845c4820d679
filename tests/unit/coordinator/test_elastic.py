"""Servers come and go while a run goes on: real servers, real gRPC, a real process group; scripted engines."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from asyppo_async.errors import FleetUnavailable
from asyppo_async.trainer.coordinator.connecting import connect
from asyppo_async.trainer.coordinator.generated import Generated
from asyppo_async.trainer.coordinator.membership import Fleet
from asyppo_async.trainer.coordinator.publish import Publisher, open_publisher
from asyppo_async.types import Prompt
from tests.unit.coordinator.publish_fleet import (
    RUN,
    SAMPLING,
    SETTINGS,
    Sender,
    Server,
    expected_of,
    plan,
    start,
    write_model,
)

PROMPT = Prompt(id="p", task="arithmetic", text="1+2=", token_ids=(5, 6, 7), answer="3")


class World:
    """A fleet whose servers a test starts and ends."""

    def __init__(self, folder: Path, tasks: asyncio.TaskGroup) -> None:
        self.model = write_model(folder / "model")
        self.sender = Sender(self.model, marked_by="version")
        self._folder = folder
        self._tasks = tasks
        self._count = 0

    async def start(self, port: int = 0, delay_s: float = 0.0) -> Server:
        self._count += 1
        ready = self._folder / f"ready-{self._count}"
        return await start(self._tasks, self.model, ready, "version", port, delay_s)

    @asynccontextmanager
    async def run(self, servers: list[Server]) -> AsyncIterator[tuple[Fleet, Publisher]]:
        addresses = [server.address for server in servers]
        async with (
            connect(addresses, expected_of(self.model), RUN, 10.0, debug=True) as fleet,
            open_publisher(
                sender=self.sender, fleet=fleet, settings=SETTINGS, plan=plan(), host="127.0.0.1", version=0
            ) as publisher,
        ):
            yield fleet, publisher
        for server in servers:
            server.stop.received.set()


async def group(fleet: Fleet, counts: list[int] | None = None) -> Generated:
    note = (counts if counts is not None else []).append
    return await fleet.generate(
        PROMPT, num_samples=3, sampling=SAMPLING, deadline_s=30, on_tokens=note, on_server=lambda _: None
    )


async def test_group_when_its_server_ends_then_goes_on_elsewhere_with_the_tokens_it_had(
    tmp_path: Path,
) -> None:
    async with asyncio.TaskGroup() as tasks:
        world = World(tmp_path, tasks)
        first, second = await world.start(delay_s=0.05), await world.start()
        async with world.run([first, second]) as (fleet, _):
            counts: list[int] = []
            generating = tasks.create_task(group(fleet, counts))
            async with asyncio.timeout(10):
                while not counts or counts[-1] < 24:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            first.stop.received.set()  # drains for a tenth of a second
            generated = await generating
            assert generated.server == second.address
            assert [len(response.token_ids) for response in generated.responses] == [SAMPLING.max_tokens] * 3
            resumed = [len(prompt) - len(PROMPT.token_ids) for prompt in second.engine.prompts[-3:]]
            assert sum(resumed) >= 24, "nothing that had arrived was made again"
            assert counts == sorted(counts) and counts[-1] == 3 * SAMPLING.max_tokens
            assert (fleet.num_lost, fleet.num_moves) == (1, 1)
            assert all(member.outstanding_tokens == 0 for member in fleet.members)


@pytest.mark.report("P09")
async def test_publication_when_a_server_is_gone_then_the_others_get_the_same_version_at_once(
    tmp_path: Path,
) -> None:
    async with asyncio.TaskGroup() as tasks:
        world = World(tmp_path, tasks)
        first, second, third = [await world.start() for _ in range(3)]
        async with world.run([first, second, third]) as (fleet, publisher):
            second.stop.received.set()
            await asyncio.sleep(1.5)
            started_s = time.monotonic()
            publication = await publisher.publish(1)
            assert time.monotonic() - started_s < 2 * SETTINGS.min_deadline_s
            assert [server.address for server in publication.servers] == [first.address, third.address]
            assert fleet.state.is_lost(second.address) and fleet.state.served_version == 1
            assert {int(v) for r in (await group(fleet)).responses for v in r.versions.per_token()} == {1}


async def test_publication_when_a_server_dies_at_its_commit_then_the_others_are_healed_by_a_repeat(
    tmp_path: Path,
) -> None:
    async with asyncio.TaskGroup() as tasks:
        world = World(tmp_path, tasks)
        first, second = await world.start(delay_s=0.02), await world.start()
        async with world.run([first, second]) as (fleet, publisher):
            generating = tasks.create_task(group(fleet))
            await asyncio.sleep(0.1)
            second.engine.faults["load"] = "out of memory"
            second.stop.received.set()
            publication = await publisher.publish(1)
            assert [server.address for server in publication.servers] == [first.address]
            versions = [int(v) for r in (await generating).responses for v in r.versions.per_token()]
            assert set(versions) <= {0, 1}, "what was cut off by the failed update went on"


@pytest.mark.report("P13")
@pytest.mark.report("P50")
async def test_server_when_it_comes_back_then_the_next_publication_takes_it_in(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as tasks:
        world = World(tmp_path, tasks)
        first, second = await world.start(), await world.start()
        port = int(second.address.rsplit(":", 1)[1])
        async with world.run([first, second]) as (fleet, publisher):
            second.stop.received.set()
            await asyncio.sleep(1.5)
            await publisher.publish(1)
            again = await world.start(port)
            async with asyncio.timeout(20):
                while fleet.state.is_lost(again.address):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            for _ in range(2):
                assert (await group(fleet)).server == first.address, "not before it has weights of this run"
            publication = await publisher.publish(2)
            assert {server.address for server in publication.servers} == {first.address, again.address}
            assert len(fleet.current) == 2 and fleet.num_rejoined == 1
            again.stop.received.set()


async def test_fleet_when_every_server_is_lost_then_the_error_names_the_last(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as tasks:
        world = World(tmp_path, tasks)
        first, second = await world.start(), await world.start()
        async with world.run([first, second]) as (fleet, _):
            for server in (first, second):
                server.stop.received.set()
            await asyncio.sleep(1.5)
            with pytest.raises(FleetUnavailable, match=rf"server ({first.address}|{second.address})"):
                await group(fleet)
            assert fleet.num_lost == 2
