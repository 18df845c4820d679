"""The other end of a weight group, run as a process of its own: `python peer.py '{...}'`, one JSON line per event."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from asyppo_async.errors import WeightSyncError
from asyppo_async.weights.buckets import plan_buckets
from asyppo_async.weights.manifest import Manifest, TensorSpec
from asyppo_async.weights.store import open_store
from asyppo_async.weights.transfer import (
    WeightGroup,
    checksums_of,
    receive_into,
    send_tensors,
    tensors_in,
)


def manifest_of(num_elements: int, num_tensors: int) -> Manifest:
    """Odd sizes, both types, an empty tensor and a scalar."""
    specs = [
        TensorSpec(
            name=f"model.layers.{index}.{'mlp.up_proj' if index % 2 else 'self_attn.q_proj'}.weight",
            shape=(num_elements + index, 3),
            dtype="bfloat16" if index % 2 else "float32",
        )
        for index in range(num_tensors)
    ]
    specs += [
        TensorSpec(name="empty", shape=(0, 4), dtype="float32"),
        TensorSpec(name="scalar", shape=(), dtype="float32"),
    ]
    return Manifest(tensors=tuple(specs))


def tensors_of(manifest: Manifest, seed: int, pause_s: float = 0.0) -> Iterator[tuple[str, torch.Tensor]]:
    """Always float32, whatever the manifest sends."""
    generator = torch.Generator().manual_seed(seed)
    for spec in manifest.tensors:
        time.sleep(pause_s)
        yield spec.name, torch.randn(spec.shape, generator=generator)


def same(manifest: Manifest, buffer: torch.Tensor, seed: int) -> bool:
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    got = dict(tensors_in(manifest, buffer))
    return all(
        torch.equal(got[spec.name], tensor.to(dtypes[spec.dtype]))
        for spec, (_, tensor) in zip(manifest.tensors, tensors_of(manifest, seed), strict=True)
    )


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


def once_received(buffer: torch.Tensor, num_bytes: int, then: Callable[[], None]) -> None:
    """Call `then` as soon as something has come into the kibibyte of a buffer of zeros that ends at `num_bytes`."""
    while not buffer[num_bytes - 1024 : num_bytes].any():
        time.sleep(0.0005)
    then()


def receive(arguments: dict, manifest: Manifest) -> None:
    group = WeightGroup.join(
        backend="gloo",
        store=("127.0.0.1", arguments["port"]),
        rank=arguments["rank"],
        world_size=arguments["world_size"],
        epoch=arguments["epoch"],
        deadline_s=arguments["deadline_s"],
    )
    say(joined=True)
    buckets = plan_buckets(manifest, arguments["bucket_bytes"])
    if arguments.get("stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
    for seed in arguments["seeds"]:
        buffer = torch.zeros(manifest.num_bytes, dtype=torch.uint8)
        if "die_after_bytes" in arguments:
            die = partial(os.kill, os.getpid(), signal.SIGKILL)
            threading.Thread(target=once_received, args=(buffer, arguments["die_after_bytes"], die)).start()
        report = receive_into(group, manifest, buckets, buffer, arguments["deadline_s"])
        say(
            same=same(manifest, buffer, seed),
            checksums=report.checksums,
            again=checksums_of(manifest, buffer),
            num_bytes=report.num_bytes,
        )
    group.close()


def send(arguments: dict, manifest: Manifest) -> None:
    store, port = open_store("127.0.0.1", arguments["world_size"], arguments["deadline_s"])
    say(port=port)
    group = WeightGroup.join(
        backend="gloo",
        store=store,
        rank=0,
        world_size=arguments["world_size"],
        epoch=arguments["epoch"],
        deadline_s=arguments["deadline_s"],
        host="127.0.0.1",
    )
    say(joined=True)
    buckets = plan_buckets(manifest, arguments["bucket_bytes"])
    tensors = tensors_of(manifest, 0, arguments.get("pause_s", 0.0))
    send_tensors(group, manifest, buckets, tensors, arguments["deadline_s"])


def leave(arguments: dict, manifest: Manifest) -> None:
    """Close both ends of a transfer that is half through, and end about when gloo gives it up."""
    store, port = open_store("127.0.0.1", 2, 20.0)

    def join(rank: int) -> WeightGroup:
        place = ("127.0.0.1", port) if rank else store
        return WeightGroup.join(
            backend="gloo", store=place, rank=rank, world_size=2, epoch=1, deadline_s=20.0, host="127.0.0.1"
        )

    with ThreadPoolExecutor(2) as threads:
        groups = list(threads.map(join, range(2)))
    for group, num_mib in zip(groups, (16, 32), strict=True):
        data = torch.zeros(num_mib * 2**20, dtype=torch.uint8)
        group.begin_broadcast(data, "more than is sent", arguments["deadline_s"])
    for group in groups:
        group.close()
    say(outlives="closed-group" in [thread.name for thread in threading.enumerate()])


def main() -> None:
    torch.set_num_threads(1)
    arguments = json.loads(sys.argv[1])
    manifest = manifest_of(arguments["num_elements"], arguments["num_tensors"])
    try:
        {"send": send, "receive": receive, "leave": leave}[arguments["role"]](arguments, manifest)
    except WeightSyncError as error:
        say(error=str(error))


if __name__ == "__main__":
    main()
