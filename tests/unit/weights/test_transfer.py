import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from asyppo_async.errors import WeightSyncError
from asyppo_async.weights.buckets import ALONE_BYTES, plan_buckets
from asyppo_async.weights.group import Broadcast
from asyppo_async.weights.manifest import Manifest, TensorSpec
from asyppo_async.weights.store import open_store
from asyppo_async.weights.transfer import WeightGroup, receive_into, send_tensors
from tests.unit.weights.peer import manifest_of, once_received, tensors_of

PEER = Path(__file__).with_name("peer.py")
MIB = 2**20


class Peer:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def event(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 60)
        return json.loads(line) if line else {"ended": True}


@asynccontextmanager
async def peer(**arguments: object) -> AsyncIterator[Peer]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PEER), json.dumps(arguments), stdout=asyncio.subprocess.PIPE
    )
    try:
        yield Peer(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def session(
    num_receivers: int,
    *,
    num_elements: int,
    num_tensors: int,
    bucket_bytes: int,
    deadline_s: float = 20.0,
    **extra: Any,
) -> AsyncIterator[tuple[WeightGroup, Manifest, list[Peer]]]:
    """This process as the sender, and receivers of their own."""
    world_size = num_receivers + 1
    store, port = open_store("127.0.0.1", world_size, deadline_s)
    async with AsyncExitStack() as stack:
        peers = [
            await stack.enter_async_context(
                peer(
                    role="receive",
                    port=port,
                    rank=rank,
                    world_size=world_size,
                    epoch=7,
                    deadline_s=deadline_s,
                    bucket_bytes=bucket_bytes,
                    num_elements=num_elements,
                    num_tensors=num_tensors,
                    **{"seeds": [0], **extra},
                )
            )
            for rank in range(1, world_size)
        ]
        group = await asyncio.to_thread(
            WeightGroup.join,
            backend="gloo",
            store=store,
            rank=0,
            world_size=world_size,
            epoch=7,
            deadline_s=60.0,
            host="127.0.0.1",
        )
        stack.callback(group.close)
        for member in peers:
            assert await member.event() == {"joined": True}
        yield group, manifest_of(num_elements, num_tensors), peers


@pytest.mark.parametrize(("num_receivers", "bucket_bytes"), [(1, 64 * MIB), (2, 1024), (2, 4096 + 64)])
async def test_send_of_two_versions_when_buckets_are_of_any_size_then_every_receiver_holds_the_tensors(
    num_receivers: int, bucket_bytes: int
) -> None:
    async with session(
        num_receivers, num_elements=333, num_tensors=6, bucket_bytes=bucket_bytes, seeds=[1, 2]
    ) as (group, manifest, peers):
        buckets = plan_buckets(manifest, bucket_bytes)
        for seed in (1, 2):
            report = await asyncio.to_thread(
                send_tensors, group, manifest, buckets, tensors_of(manifest, seed), 20.0
            )
            assert report.num_bytes == manifest.num_bytes
            for member in peers:
                event = await member.event()
                assert event["same"]
                assert event["checksums"] == event["again"] == list(report.checksums)
                assert event["num_bytes"] == manifest.num_bytes


async def test_send_when_a_receiver_is_killed_then_it_fails_at_once_and_says_which_bucket() -> None:
    async with session(2, num_elements=MIB, num_tensors=8, bucket_bytes=4 * MIB) as (group, manifest, peers):
        buckets = plan_buckets(manifest, 4 * MIB)
        tensors = dict(tensors_of(manifest, 0))

        def slowly() -> Any:
            for index, (name, tensor) in enumerate(tensors.items()):
                if index == 3:
                    peers[1].process.kill()
                    time.sleep(0.2)
                yield name, tensor

        started_s = time.monotonic()
        with pytest.raises(
            WeightSyncError, match=r"rank 0 of 3, weight session epoch 7: sending bucket \d+ of"
        ):
            await asyncio.to_thread(send_tensors, group, manifest, buckets, slowly(), 30.0)
        assert time.monotonic() - started_s < 5
        group.close()
        assert "receiving bucket" in (await peers[0].event())["error"]


async def test_send_when_a_receiver_dies_within_a_bucket_then_it_fails_at_once() -> None:
    """What is left of the bucket waits for the socket then, where gloo forgets it."""
    async with session(
        1, num_elements=16 * MIB, num_tensors=1, bucket_bytes=256 * MIB, die_after_bytes=MIB
    ) as (group, manifest, _):
        started_s = time.monotonic()
        with pytest.raises(WeightSyncError, match="sending bucket 1 of"):
            await asyncio.to_thread(
                send_tensors,
                group,
                manifest,
                plan_buckets(manifest, 256 * MIB),
                tensors_of(manifest, 0),
                30.0,
            )
        group.close()
        assert time.monotonic() - started_s < 10


async def receiver_of(sender: Peer) -> WeightGroup:
    """This process as the only receiver of a peer that sends, in epoch 3."""
    return await asyncio.to_thread(
        WeightGroup.join,
        backend="gloo",
        store=("127.0.0.1", (await sender.event())["port"]),
        rank=1,
        world_size=2,
        epoch=3,
        deadline_s=20.0,
    )


async def test_receive_when_the_sender_dies_within_a_bucket_then_it_fails_at_once() -> None:
    sizes = {"num_elements": 16 * MIB, "num_tensors": 1}
    manifest = manifest_of(**sizes)
    arguments = {**sizes, "bucket_bytes": 256 * MIB, "world_size": 2, "epoch": 3, "deadline_s": 30.0}
    async with peer(role="send", **arguments) as sender:
        group = await receiver_of(sender)
        buffer = torch.zeros(manifest.num_bytes, dtype=torch.uint8)
        killed_s: list[float] = []

        def kill() -> None:
            os.kill(sender.process.pid, signal.SIGKILL)
            killed_s.append(time.monotonic())

        threading.Thread(target=once_received, args=(buffer, MIB, kill)).start()
        with pytest.raises(WeightSyncError, match="receiving bucket 1 of"):
            await asyncio.to_thread(
                receive_into, group, manifest, plan_buckets(manifest, 256 * MIB), buffer, 30.0
            )
        group.close()
        assert time.monotonic() - killed_s[0] < 5


async def test_send_when_a_receiver_is_stopped_then_it_fails_at_the_deadline() -> None:
    async with session(1, num_elements=2 * MIB, num_tensors=8, bucket_bytes=8 * MIB, stop=True) as (
        group,
        manifest,
        _,
    ):
        started_s = time.monotonic()
        with pytest.raises(WeightSyncError, match="sending bucket"):
            await asyncio.to_thread(
                send_tensors, group, manifest, plan_buckets(manifest, 8 * MIB), tensors_of(manifest, 0), 2.0
            )
        assert 1.5 < time.monotonic() - started_s < 5


async def test_receive_when_the_sender_is_killed_then_it_fails_at_once() -> None:
    arguments = {"num_elements": 1000, "num_tensors": 50, "bucket_bytes": 4096, "world_size": 2, "epoch": 3}
    manifest = manifest_of(1000, 50)
    async with peer(role="send", deadline_s=20.0, pause_s=0.1, **arguments) as sender:
        group = await receiver_of(sender)
        buffer = torch.empty(manifest.num_bytes, dtype=torch.uint8)
        started_s = time.monotonic()
        asyncio.get_running_loop().call_later(1.0, sender.process.kill)
        with pytest.raises(WeightSyncError, match="receiving bucket"):
            await asyncio.to_thread(receive_into, group, manifest, plan_buckets(manifest, 4096), buffer, 20.0)
        assert time.monotonic() - started_s < 5
        group.close()


async def join_alone(epoch: int, deadline_s: float) -> None:
    store, _ = open_store("127.0.0.1", 2, deadline_s)
    await asyncio.to_thread(
        WeightGroup.join,
        backend="gloo",
        store=store,
        rank=0,
        world_size=2,
        epoch=epoch,
        deadline_s=deadline_s,
        host="127.0.0.1",
    )


async def test_join_when_a_rank_is_missing_then_it_fails_at_the_deadline() -> None:
    started_s = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"rank 0 of 2 could not join the weight session epoch 5"):
        await join_alone(5, 1.0)
    assert time.monotonic() - started_s < 4


async def test_join_when_the_store_is_gone_then_it_fails_by_the_deadline() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    started_s = time.monotonic()
    with pytest.raises(WeightSyncError, match="could not join"):
        await asyncio.to_thread(
            WeightGroup.join,
            backend="gloo",
            store=("127.0.0.1", port),
            rank=1,
            world_size=2,
            epoch=1,
            deadline_s=1.0,
        )
    assert time.monotonic() - started_s < 10


@pytest.mark.report("P08")
def test_open_store_when_given_one_address_then_no_other_address_reaches_it() -> None:
    store, port = open_store("127.0.0.1", 2, 5.0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=2)
    socket.create_connection(("127.0.0.1", port), timeout=2).close()
    del store


def test_open_store_when_the_address_is_not_ours_then_it_says_so() -> None:
    with pytest.raises(WeightSyncError, match=r"cannot listen on 192\.0\.2\.1"):
        open_store("192.0.2.1", 2, 5.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors[1:], "next, got model.layers.1"),
        (lambda tensors: tensors[:-1], r"the manifest has scalar \[\] next, got nothing"),
        (lambda tensors: [*tensors, ("more", torch.zeros(1))], "more comes after the last tensor"),
        (lambda tensors: [(tensors[0][0], torch.zeros(0)), *tensors[1:]], r"got .*q_proj.weight \[0\]"),
    ],
)
def test_send_when_tensors_are_not_those_of_the_manifest_then_it_names_the_first(
    change: Callable[[list[tuple[str, torch.Tensor]]], list[tuple[str, torch.Tensor]]], message: str
) -> None:
    manifest = manifest_of(10, 2)
    store, _ = open_store("127.0.0.1", 1, 10.0)
    alone = WeightGroup.join(
        backend="gloo", store=store, rank=0, world_size=1, epoch=1, deadline_s=10.0, host="127.0.0.1"
    )
    with pytest.raises(WeightSyncError, match=message):
        send_tensors(alone, manifest, plan_buckets(manifest, MIB), change(list(tensors_of(manifest, 0))), 5.0)
    alone.close()


@pytest.mark.report("P11")
def test_send_when_there_are_many_tensors_then_only_two_are_alive_beside_two_buckets() -> None:
    manifest = manifest_of(100, 300)
    buckets = plan_buckets(manifest, 4096)
    store, _ = open_store("127.0.0.1", 1, 10.0)
    alone = WeightGroup.join(
        backend="gloo", store=store, rank=0, world_size=1, epoch=1, deadline_s=10.0, host="127.0.0.1"
    )
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for spec in manifest.tensors:
            tensor = torch.zeros(spec.shape)
            alive.add(tensor)
            most = max(most, len(alive))
            yield spec.name, tensor

    send_tensors(alone, manifest, buckets, gathered(), 20.0)
    alone.close()
    assert len(buckets) > 50
    assert most <= 2


class Watching(WeightGroup):
    """Notes from which memory it sends."""

    sources: list[int]

    def begin_broadcast(self, data: torch.Tensor, what: str, deadline_s: float) -> Broadcast:
        self.sources = [*getattr(self, "sources", []), data.data_ptr()]
        return super().begin_broadcast(data, what, deadline_s)


@pytest.mark.report("P11")
def test_send_when_a_tensor_is_large_then_it_leaves_from_where_it_is() -> None:
    large = ALONE_BYTES // 4
    sizes = {"a": 100, "b": large, "c": large, "d": large + 1, "e": 3 * large, "f": 100}
    manifest = Manifest(
        tensors=tuple(TensorSpec(name=name, shape=(size,), dtype="float32") for name, size in sizes.items())
    )
    buckets = plan_buckets(manifest, 2 * ALONE_BYTES)
    store, _ = open_store("127.0.0.1", 1, 10.0)
    alone = Watching.join(
        backend="gloo", store=store, rank=0, world_size=1, epoch=1, deadline_s=10.0, host="127.0.0.1"
    )
    tensors = {name: torch.ones(size) for name, size in sizes.items()}
    send_tensors(alone, manifest, buckets, tensors.items(), 20.0)
    alone.close()
    starts = [tensors[name].data_ptr() for name in "bce"]
    second_piece = tensors["e"].data_ptr() + 2 * ALONE_BYTES
    assert [source for source in alone.sources if source in starts] == starts
    assert second_piece in alone.sources
    # The others from a buffer: a and f are small, and d ends within its padding.
    assert len(alone.sources) == len(buckets) == 7


def test_receive_into_when_the_buffer_has_the_wrong_size_then_it_is_refused() -> None:
    manifest = manifest_of(10, 2)
    never: Any = None
    with pytest.raises(ValueError, match="the buffer must be uint8"):
        receive_into(never, manifest, (), torch.empty(1, dtype=torch.uint8), 1.0)


async def test_close_when_another_thread_is_receiving_then_it_does_not_wait_for_that() -> None:
    arguments = {"num_elements": 10, "num_tensors": 2, "bucket_bytes": 4096, "world_size": 2, "epoch": 3}
    manifest = manifest_of(10, 2)
    async with peer(role="send", deadline_s=20.0, pause_s=60.0, **arguments) as sender:
        group = await receiver_of(sender)
        buffer = torch.empty(manifest.num_bytes, dtype=torch.uint8)
        buckets = plan_buckets(manifest, 4096)
        took_s: list[float] = []

        def close() -> None:
            started_s = time.monotonic()
            group.close()
            took_s.append(time.monotonic() - started_s)

        asyncio.get_running_loop().call_later(0.5, close)
        with pytest.raises(WeightSyncError):
            await asyncio.to_thread(receive_into, group, manifest, buckets, buffer, 3.0)
        assert took_s[0] < 0.5


async def test_close_when_a_receive_of_its_own_is_under_way_then_all_others_notice() -> None:
    """Who waits for rank 0 hears from it that rank 2 has left, though rank 0 sends nothing."""
    store, port = open_store("127.0.0.1", 3, 20.0)
    _, waiting, leaving = await asyncio.gather(
        *(
            asyncio.to_thread(
                WeightGroup.join,
                backend="gloo",
                store=("127.0.0.1", port) if rank else store,
                rank=rank,
                world_size=3,
                epoch=4,
                deadline_s=20.0,
                host="127.0.0.1",
            )
            for rank in range(3)
        )
    )
    under_way = leaving.begin_broadcast(torch.empty(64, dtype=torch.uint8), "its bucket", 20.0)
    started_s = time.monotonic()
    asyncio.get_running_loop().call_later(0.2, leaving.close)
    with pytest.raises(WeightSyncError, match="Connection closed by peer"):
        await asyncio.to_thread(waiting.receive_bucket, torch.empty(64, dtype=torch.uint8), 20.0)
    with pytest.raises(WeightSyncError, match="its bucket failed"):
        await asyncio.to_thread(under_way.finish)
    assert time.monotonic() - started_s < 10


async def test_end_when_a_closed_group_is_still_being_given_up_then_the_process_is_not_aborted() -> None:
    outlived = []
    for deadline_s in (0.2, 0.25, 0.3, 0.35, 0.4):
        async with peer(role="leave", num_elements=1, num_tensors=1, deadline_s=deadline_s) as leaving:
            outlived.append((await leaving.event())["outlives"])
            assert await asyncio.wait_for(leaving.process.wait(), 30) == 0
    assert any(outlived)
