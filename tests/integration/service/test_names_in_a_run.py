"""A run follows a name: a server that appears under it joins the next publication and then gets work."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from asyppo_async.trainer.coordinator.connecting import connect
from asyppo_async.trainer.coordinator.publish import open_publisher
from tests.unit.coordinator.publish_fleet import RUN, SETTINGS, expected_of, plan
from tests.unit.coordinator.test_elastic import World, group


async def test_fleet_when_its_name_gets_a_server_then_the_next_publication_takes_it_in(
    tmp_path: Path,
) -> None:
    current: list[str] = []

    async def resolve(targets: Sequence[str]) -> tuple[str, ...]:
        assert list(targets) == ["dns:///fleet:50051"]
        return tuple(current)

    async with asyncio.TaskGroup() as tasks:
        world = World(tmp_path, tasks)
        first, second = await world.start(), await world.start()
        current.append(first.address)
        expected = expected_of(world.model)
        async with (
            connect(["dns:///fleet:50051"], expected, RUN, 10.0, resolve=resolve, debug=True) as fleet,
            open_publisher(
                sender=world.sender, fleet=fleet, settings=SETTINGS, plan=plan(), host="127.0.0.1", version=0
            ) as publisher,
        ):
            assert [member.address for member in fleet.current] == [first.address]
            current.append(second.address)
            async with asyncio.timeout(20):
                while len(fleet.members) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert (await group(fleet)).server == first.address, "not before it has weights of this run"
            await publisher.publish(1)
            assert {member.address for member in fleet.current} == {first.address, second.address}
            fleet.members[0].outstanding_tokens = 1
            assert (await group(fleet)).server == second.address
            fleet.members[0].outstanding_tokens = 0
        for server in (first, second):
            server.stop.received.set()
