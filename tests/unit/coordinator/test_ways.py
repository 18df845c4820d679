"""The ways of a publication beside the staged one, and deltas: real gRPC, gloo and files; scripted engines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

from asyppo_async.config.sections import WeightsSection
from asyppo_async.errors import WeightSyncError
from asyppo_async.rpc.calls import ServedChecksums
from asyppo_async.trainer.coordinator.membership import Fleet
from asyppo_async.trainer.coordinator.publish import Publisher, open_publisher
from asyppo_async.weights.folder import Folder
from tests.unit.coordinator.publish_fleet import SETTINGS, Sender, Server, fleet_of, plan, write_model

DIRECT = SETTINGS.model_copy(update={"way": "direct", "min_deadline_s": 4.0})
DELTA = SETTINGS.model_copy(update={"encoding": "delta"})
FIXED_BYTES = 4 * 32
"""Of a delta: what each changed tensor costs beside its elements."""


@asynccontextmanager
async def publishing(
    folder: Path, sender: Sender, settings: WeightsSection, count: int = 1
) -> AsyncIterator[tuple[Publisher, Fleet, list[Server]]]:
    async with (
        fleet_of(sender.model, folder, count, sender.marked_by, sender.dtype) as (fleet, started),
        open_publisher(
            sender=sender, fleet=fleet, settings=settings, plan=plan(), host="127.0.0.1", version=0
        ) as publisher,
    ):
        yield publisher, fleet, started


async def served(fleet: Fleet) -> list[ServedChecksums]:
    found = [await member.client.checksums(5.0) for member in fleet.members]
    assert all(found)
    return [each for each in found if each is not None]


def few_elements(name: str, before: torch.Tensor, version: int) -> torch.Tensor:
    """Of the projections q and k one element each, of the norm none, and of the embedding one in version 3."""
    after = before.clone()
    if "proj" in name or ("embed" in name and version == 3):
        after.view(-1)[version] = 0.5 + version
    return after


async def test_direct_when_all_goes_well_then_every_worker_loads_what_was_sent(tmp_path: Path) -> None:
    sender = Sender(write_model(tmp_path / "model"))
    async with publishing(tmp_path, sender, DIRECT, count=2) as (publisher, fleet, started):
        published = await publisher.publish(1)
        assert (published.attempts, published.num_bytes) == (1, sender.worker.manifest.num_bytes)
        assert published.timings.pause_s + published.timings.load_s > 0
        for each in await served(fleet):
            assert (each.version, tuple(each.tensors.values())) == (1, sender.sent[-1].checksums)
        for server in started:
            assert [what for what in server.engine.seen if what in ("begin", "received")] == [
                "begin",
                "received",
            ] * 2


async def test_direct_when_a_server_is_lost_in_it_then_the_others_get_the_same_version_again(
    tmp_path: Path,
) -> None:
    sender = Sender(write_model(tmp_path / "model"), marked_by="version")
    async with publishing(tmp_path, sender, DIRECT, count=2) as (publisher, fleet, started):
        started[1].engine.faults["finish"] = "out of memory"
        started[1].stop.received.set()
        published = await publisher.publish(1)
        assert [server.address for server in published.servers] == [started[0].address]
        assert sender.seen.count("send 1") == 2
        info = await fleet.members[0].client.info(5.0)
        assert (info.state, info.served_version) == ("serving", 1)


@pytest.mark.report("P01")
@pytest.mark.parametrize("point", ["begin", "finish"])
async def test_direct_when_a_server_fails_and_stays_then_the_others_get_a_complete_repeat(
    tmp_path: Path, point: str
) -> None:
    sender = Sender(write_model(tmp_path / "model"), marked_by="version")
    async with publishing(tmp_path, sender, DIRECT, count=2) as (publisher, fleet, started):
        started[1].engine.faults[point] = "no memory left"
        published = await publisher.publish(1)
        assert [server.address for server in published.servers] == [started[0].address]
        assert fleet.num_lost == 1, (
            "its own words blame it, not who noticed; it may be on its way back by now"
        )


async def test_delta_when_few_elements_change_then_few_bytes_travel_and_the_modules_are_loaded_whole(
    tmp_path: Path,
) -> None:
    sender = Sender(write_model(tmp_path / "model"), dtype="bfloat16", change=few_elements)
    async with publishing(tmp_path, sender, DELTA, count=2) as (publisher, fleet, started):
        full_bytes = sender.worker.manifest.num_bytes
        assert publisher.first is not None and publisher.first.num_bytes == full_bytes
        published = [await publisher.publish(version) for version in (1, 2, 3)]
        assert [each.is_delta for each in sender.sent] == [False, True, True, True]
        assert all(0 < each.num_bytes <= FIXED_BYTES < full_bytes for each in published)
        assert published[0].metrics()["weights/full_bytes"] == full_bytes
        qkv = tuple(f"model.layers.0.self_attn.{name}_proj.weight" for name in "kq")
        for server in started:
            first, *later = [set(names) for names in server.engine.loaded_names]
            assert len(first) == 4
            assert later == [set(qkv), set(qkv), {"model.embed_tokens.weight", *qkv}]
        for each in await served(fleet):  # which the engine has compared with the bytes
            assert tuple(each.tensors.values()) == sender.sent[-1].checksums


async def test_delta_when_nothing_changes_then_nothing_travels(tmp_path: Path) -> None:
    sender = Sender(
        write_model(tmp_path / "model"), dtype="bfloat16", change=lambda name, before, version: before
    )
    async with publishing(tmp_path, sender, DELTA) as (publisher, _, started):
        assert (await publisher.publish(1)).num_bytes == 0
        assert started[0].engine.loaded_names[-1] == ()


async def test_delta_when_all_changes_then_everything_is_sent(tmp_path: Path) -> None:
    sender = Sender(write_model(tmp_path / "model"), dtype="bfloat16")
    async with publishing(tmp_path, sender, DELTA) as (publisher, _, _):
        assert (await publisher.publish(1)).num_bytes == sender.worker.manifest.num_bytes
        assert not sender.sent[-1].is_delta


async def test_delta_when_a_publication_failed_then_the_next_one_is_right_and_loads_what_was_missed(
    tmp_path: Path,
) -> None:
    """Version 1 arrives in host memory and is never loaded: version 2 must bring its changes too."""
    sender = Sender(
        write_model(tmp_path / "model"), dtype="bfloat16", change=few_elements, marked_by="version"
    )
    async with publishing(tmp_path, sender, DELTA) as (publisher, fleet, started):
        await publisher.publish(1)
        await publisher.publish(2)
        started[0].engine.faults["verify"] = "bytes differ"
        with pytest.raises(WeightSyncError, match="bytes differ"):
            await publisher.publish(3)
        sender.change = lambda name, before, version: before
        published = await publisher.publish(4)
        assert published.num_bytes == 0 and sender.sent[-1].is_delta, "the memory holds version 3"
        assert "model.embed_tokens.weight" in started[0].engine.loaded_names[-1]
        (each,) = await served(fleet)
        assert tuple(each.tensors.values()) == sender.sent[-1].checksums


async def test_delta_when_a_probe_fails_then_the_repeat_sends_everything(tmp_path: Path) -> None:
    sender = Sender(write_model(tmp_path / "model"), dtype="bfloat16", change=few_elements)
    async with publishing(tmp_path, sender, DELTA) as (publisher, _, started):
        sender.offsets = [0.5]
        assert (await publisher.publish(1)).attempts == 2
        assert [each.is_delta for each in sender.sent] == [False, True, False]
        assert len(started[0].engine.loaded_names[-1]) == 4


async def test_delta_when_a_server_joins_then_all_get_everything_once(tmp_path: Path) -> None:
    sender = Sender(
        write_model(tmp_path / "model"), dtype="bfloat16", change=few_elements, marked_by="version"
    )
    async with publishing(tmp_path, sender, DELTA, count=2) as (publisher, fleet, _):
        for version in (1, 2):
            await publisher.publish(version)
        fleet.state.set_aside(fleet.members[1].address)
        await publisher.publish(3)
        fleet.state.bring_back()
        await publisher.publish(4)
        await publisher.publish(5)
        assert [each.is_delta for each in sender.sent] == [False, True, True, True, False, True]
        for each in await served(fleet):
            assert tuple(each.tensors.values()) == sender.sent[-1].checksums


@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
@pytest.mark.parametrize("encoding", ["full", "delta"])
async def test_folder_when_servers_share_no_group_then_they_pull_every_version(
    tmp_path: Path, encoding: str, scheme: str
) -> None:
    """By a path, by its URL, and from a store of objects that is no file system of this machine."""
    sender = Sender(write_model(tmp_path / "model"), dtype="bfloat16", change=few_elements)
    folder = f"{scheme}{tmp_path}/published"
    settings = SETTINGS.model_copy(update={"way": "folder", "folder": folder, "encoding": encoding})
    async with publishing(tmp_path, sender, settings, count=2) as (publisher, fleet, started):
        for version in (1, 2):
            published = await publisher.publish(version)
            assert (published.num_bytes <= FIXED_BYTES) == (encoding == "delta")
        for each in await served(fleet):
            assert (each.version, tuple(each.tensors.values())) == (2, sender.sent[-1].checksums)
        kind = "delta" if encoding == "delta" else "full"
        run = Folder.at(f"{folder}/run-1")
        assert run.names() == [f"{kind}-00000001", f"{kind}-00000002"]
        assert (tmp_path / "published").exists() == (scheme != "memory://")
        assert started[0].engine.seen.count("join") == 0
        run.remove()
        run.system.pipe_file(run.path, b"in the way")
        with pytest.raises(WeightSyncError, match=r"version 3: phase stage: .*cannot be written"):
            await publisher.publish(3)


async def test_folder_when_the_store_is_unknown_or_its_client_fails_then_its_words_are_in_the_error(
    tmp_path: Path,
) -> None:
    class NoNetwork(MemoryFileSystem):  # type: ignore[misc]
        """Raises what has no type in common with a file system's errors, as clients of object stores do."""

        protocol = "nonetwork"

        def pipe_file(self, *_: object, **__: object) -> None:
            raise LookupError("no endpoint")

    register_implementation("nonetwork", NoNetwork, clobber=True)
    for index, (folder, words) in enumerate(
        (
            (
                "nosuch://bucket/runs",
                "nosuch://bucket/runs/run-1 cannot be opened: Protocol not known: nosuch",
            ),
            ("nonetwork://bucket/runs", "cannot be written: .*no endpoint"),
        )
    ):
        model = write_model(tmp_path / str(index))
        settings = SETTINGS.model_copy(update={"way": "folder", "folder": folder})
        with pytest.raises(WeightSyncError, match=f"version 0: phase stage: .*{words}"):
            async with publishing(model, Sender(model), settings):
                pytest.fail("nothing was written")


@pytest.mark.report("P22")
async def test_folder_when_a_file_is_damaged_then_the_tensor_is_named_and_the_old_version_serves(
    tmp_path: Path,
) -> None:
    sender = Sender(write_model(tmp_path / "model"))
    folder = tmp_path / "published"
    settings = SETTINGS.model_copy(update={"way": "folder", "folder": str(folder)})
    async with publishing(tmp_path, sender, settings) as (publisher, fleet, _):

        async def damage() -> None:
            place = folder / "run-1" / "full-00000001"
            while not (place / "index.json").exists():  # noqa: ASYNC110
                await asyncio.sleep(0)
            last = sorted(place.glob("*.safetensors"))[-1]
            data = bytearray(last.read_bytes())
            data[-1] ^= 1
            last.write_bytes(data)

        async with asyncio.TaskGroup() as tasks:
            damaging = tasks.create_task(damage())
            with pytest.raises(WeightSyncError, match="files of 1 tensors are not what their index says"):
                await publisher.publish(1)
            damaging.cancel()
        info = await fleet.members[0].client.info(5.0)
        assert (info.state, info.served_version) == ("serving", 0)
