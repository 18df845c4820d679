"""Tensors handed over as they arrive: what the direct way loads, and how much memory it holds meanwhile."""

import asyncio
import threading
import weakref

import pytest
import torch

from asyppo_async.weights.buckets import plan_buckets
from asyppo_async.weights.checksum import checksum_of
from asyppo_async.weights.group import WeightGroup
from asyppo_async.weights.manifest import Manifest, TensorSpec
from asyppo_async.weights.store import open_store
from asyppo_async.weights.stream import receive_tensors
from asyppo_async.weights.transfer import send_tensors
from tests.unit.weights.peer import manifest_of, tensors_of


def pair(epoch: int = 1) -> list[WeightGroup]:
    """Both ranks in this process."""
    store, port = open_store("127.0.0.1", 2, 10.0)
    groups: dict[int, WeightGroup] = {}

    def meet(rank: int) -> None:
        place = store if rank == 0 else ("127.0.0.1", port)
        groups[rank] = WeightGroup.join(
            backend="gloo",
            store=place,
            rank=rank,
            world_size=2,
            epoch=epoch,
            deadline_s=10.0,
            host="127.0.0.1",
        )

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [groups[0], groups[1]]


@pytest.mark.parametrize(
    ("num_elements", "bucket_bytes"),
    [(33, 64), (33, 1024), (33, 4096 + 64), (33, 2**24), (600_000, 2**20), (600_000, 2**24)],
)
async def test_receive_when_buckets_are_of_any_size_then_every_tensor_is_as_it_was_sent(
    num_elements: int,
    bucket_bytes: int,
) -> None:
    """Large ones leave from where they are, small ones from buffers."""
    sender, receiver = pair()
    manifest = manifest_of(num_elements, 6)
    buckets = plan_buckets(manifest, bucket_bytes)

    def receive() -> list[tuple[str, torch.Tensor]]:
        return list(receive_tensors(receiver, manifest, buckets, 10.0))

    async with asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(
            asyncio.to_thread(send_tensors, sender, manifest, buckets, tensors_of(manifest, 3), 10.0)
        )
        receiving = tasks.create_task(asyncio.to_thread(receive))
    for group in (sender, receiver):
        group.close()
    expected = dict(tensors_of(manifest, 3))
    received = receiving.result()
    assert [name for name, _ in received] == [spec.name for spec in manifest.tensors]
    for name, tensor in received:
        assert torch.equal(tensor, expected[name].to(tensor.dtype))
    assert tuple(checksum_of(tensor) for _, tensor in received) == sending.result().checksums


@pytest.mark.report("P11")
@pytest.mark.parametrize("bucket_bytes", [64 * 1024, 8 * 1024], ids=["many modules", "less than a module"])
async def test_receive_when_the_model_has_a_thousand_tensors_then_two_buckets_and_a_module_are_held(
    monkeypatch: pytest.MonkeyPatch, bucket_bytes: int
) -> None:
    """Every buffer that the receiver makes is counted while it lives.

    As vLLM does, the loader refers to the tensors of a module until it has all, and its loop to the last one.
    """
    specs = [
        TensorSpec(name=f"model.layers.{index}.self_attn.{part}_proj.weight", shape=(16, 64), dtype="float32")
        for index in range(334)
        for part in "qkv"
    ]
    module_bytes = 3 * specs[0].num_bytes
    manifest = Manifest(tensors=tuple(specs))
    buckets = plan_buckets(manifest, bucket_bytes)
    alive_bytes = most_bytes = 0
    real_empty = torch.empty

    def counting(*args, **kwargs):
        nonlocal alive_bytes, most_bytes
        made = real_empty(*args, **kwargs)

        def gone(num_bytes: int = made.nbytes) -> None:
            nonlocal alive_bytes
            alive_bytes -= num_bytes

        alive_bytes += made.nbytes
        most_bytes = max(most_bytes, alive_bytes)
        weakref.finalize(made, gone)
        return made

    sender, receiver = pair()
    monkeypatch.setattr(torch, "empty", counting)

    def receive() -> int:
        num_bytes, module = 0, []
        for _, tensor in receive_tensors(receiver, manifest, buckets, 20.0):
            num_bytes += tensor.nbytes
            module.append(tensor)
            if len(module) == 3:
                module.clear()
        return num_bytes

    ones = ((spec.name, torch.ones(spec.shape)) for spec in specs)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.to_thread(send_tensors, sender, manifest, buckets, ones, 20.0))
        receiving = tasks.create_task(asyncio.to_thread(receive))
    for group in (sender, receiver):
        group.close()
    assert receiving.result() == manifest.num_bytes and len(buckets) > 60
    assert 0 < most_bytes <= 2 * bucket_bytes + module_bytes
