"""An evaluation keeps its version: one of several servers stands aside, or publications wait their bound."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from asyppo_async.trainer.coordinator.membership import Fleet
from asyppo_async.trainer.coordinator.pinning import Pin, Pinning
from asyppo_async.trainer.coordinator.publish import Publisher, open_publisher
from asyppo_async.types import Prompt
from tests.unit.coordinator.publish_fleet import SAMPLING, SETTINGS, Sender, fleet_of, plan, write_model

PROMPT = Prompt(id="p", task="arithmetic", text="1+2=", token_ids=(5, 6, 7), answer="3")


@asynccontextmanager
async def opened(folder: Path, count: int, delay_s: float = 0.0) -> AsyncIterator[tuple[Fleet, Publisher]]:
    model = write_model(folder / "model")
    sender = Sender(model, marked_by="version")
    async with (
        fleet_of(model, folder, count, "version") as (fleet, _),
        open_publisher(
            sender=sender, fleet=fleet, settings=SETTINGS, plan=plan(), host="127.0.0.1", version=0
        ) as publisher,
    ):
        sender.delay_s = delay_s
        yield fleet, publisher


async def served_by(source: Fleet | Pin) -> tuple[str, set[int]]:
    asked = {"num_samples": 2, "sampling": SAMPLING, "deadline_s": 20, "on_tokens": lambda _: None}
    if isinstance(source, Fleet):
        asked["on_server"] = lambda _: None
    generated = await source.generate(PROMPT, **asked)
    versions = {version for response in generated.responses for version, _ in response.versions.runs}
    return generated.server, versions


async def served_versions(fleet: Fleet) -> list[int]:
    return [(await member.client.info(5)).served_version for member in fleet.members]


@pytest.mark.report("P83")
async def test_evaluation_on_two_servers_pins_one_and_the_next_publication_brings_it_up_to_date(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, 2) as (fleet, publisher):
        pinning = Pinning(fleet, hold_s=1.0)
        async with pinning.beside_training() as pin:
            assert pin.member is fleet.members[0]
            for version in (1, 2):
                await pinning.before_publication()
                publication = await publisher.publish(version)
                assert [server.address for server in publication.servers] == [fleet.members[1].address]
            assert await served_versions(fleet) == [0, 2]
            assert await served_by(pin) == (fleet.members[0].address, {0})
            for _ in range(3):
                assert await served_by(fleet) == (fleet.members[1].address, {2}), (
                    "training works on the newest"
                )
        assert (pin.skipped_publications, pin.held_s) == (2, 0)
        assert fleet.current == (fleet.members[1],), "it is back, but its weights are old"
        publication = await publisher.publish(3)
        assert len(publication.servers) == 2 and await served_versions(fleet) == [3, 3]
        assert fleet.current == fleet.members
        assert await served_by(fleet) == (fleet.members[0].address, {3})


async def test_set_version_when_a_server_had_stood_aside_then_it_gets_the_bytes(tmp_path: Path) -> None:
    async with opened(tmp_path, 2) as (fleet, publisher):
        pinning = Pinning(fleet, hold_s=1.0)
        async with pinning.beside_training():
            await publisher.publish(1)
            assert await publisher.set_version(2) is None
        publication = await publisher.set_version(3)
        assert publication is not None and publication.num_bytes > 0
        assert await served_versions(fleet) == [3, 3]
        assert await publisher.set_version(4) is None and await served_versions(fleet) == [4, 4]


async def test_pin_when_a_publication_is_under_way_then_it_waits_for_its_end(tmp_path: Path) -> None:
    async with opened(tmp_path, 2, delay_s=0.3) as (fleet, publisher):
        pinning = Pinning(fleet, hold_s=1.0)
        publishing = asyncio.create_task(publisher.publish(1))
        await asyncio.sleep(0.1)
        async with pinning.beside_training() as pin:
            assert publishing.done() and await served_by(pin) == (fleet.members[0].address, {1})


async def test_pin_when_nobody_else_is_up_to_date_then_publications_wait_instead(tmp_path: Path) -> None:
    async with opened(tmp_path, 2) as (fleet, publisher):
        pinning = Pinning(fleet, hold_s=0.1)
        async with pinning.beside_training():
            await publisher.publish(1)
        async with pinning.beside_training() as pin:
            assert pin.member is None
            await pinning.before_publication()
            assert pin.held_s >= 0.09
            assert len((await publisher.publish(2)).servers) == 2


async def test_publication_on_one_server_waits_for_an_evaluation_but_not_longer_than_its_hold(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, 1) as (fleet, _):
        pinning = Pinning(fleet, hold_s=0.1)
        await asyncio.wait_for(pinning.before_publication(), 5)
        async with pinning.beside_training() as pin:
            pinning.note_wait(2.0)
            await asyncio.wait_for(pinning.before_publication(), 5)
            held_s = pin.held_s
            assert pin.member is None and held_s >= 0.09 and pin.trainer_wait_s == 2.0 + held_s
            await asyncio.wait_for(pinning.before_publication(), 5)
            assert pin.held_s - held_s < 0.05, "it had its time"
            assert pin.skipped_publications == 0
