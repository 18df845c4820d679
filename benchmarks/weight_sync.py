"""How close a publication comes to the wire and to vLLM's own load, in one sitting.

    python benchmarks/weight_sync.py [--megabytes 10 100 500 1000] [--servers 1 2 4] [--repeats 5] [--no-engine]

Transfer: from the sender's tensors (cast, hash, buckets) over gloo on loopback into every receiver's host memory (hash
again), until the last receiver has it all; in turns with one bare broadcast of as many bytes over the same group. The
receivers are processes that run the server's own receiving code. Pause: a real engine, from the pause to the resume of
a staged load; in turns with vLLM's own layerwise load of the same tensors from memory. Best of the repeats, after a
warm-up. The last line is one JSON object:

    transfer_ratio_500mb_N  rate of the transfer over the rate of the bare broadcast, 500 MB to N servers
    pause_over_load_500mb   pause over vLLM's own load, a model of 500 MB
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from asyppo_async.fleet.host_memory import HostMemory
from asyppo_async.fleet.update_state import RunIdentity
from asyppo_async.weights.buckets import plan_buckets
from asyppo_async.weights.group import WeightGroup
from asyppo_async.weights.manifest import Manifest, TensorSpec
from asyppo_async.weights.store import open_store
from asyppo_async.weights.transfer import receive_into, send_tensors

MB = 1_000_000
BUCKET_BYTES = 64 * 2**20
DEADLINE_S = 300.0
COLUMNS = 768
BENCHMARK = RunIdentity(run_id="benchmark", incarnation=0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 100, 500, 1000])
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-engine", action="store_true", help="leave the pause out")
    parser.add_argument("--receive", nargs=5, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.receive:
        receive(*arguments.receive)
        return
    figures: dict[str, float] = {}
    for num_servers in arguments.servers:
        for megabytes in arguments.megabytes:
            bare_s, transfer_s = compare(megabytes, num_servers, arguments.repeats)
            print(
                f"{megabytes:5} MB to {num_servers}: bare {megabytes / bare_s / 1000:.2f} GB/s, transfer "
                f"{megabytes / transfer_s / 1000:.2f} GB/s, ratio {bare_s / transfer_s:.2f}",
                flush=True,
            )
            if megabytes == 500:
                figures[f"transfer_ratio_500mb_{num_servers}"] = round(bare_s / transfer_s, 3)
    if not arguments.no_engine:
        figures |= pause(arguments.repeats)
    print(json.dumps(figures))


def manifest_of(megabytes: int) -> Manifest:
    """Matrices of 10 MB at most, as many as it takes."""
    rows = min(10, megabytes) * MB // (4 * COLUMNS)
    count = max(1, megabytes // 10)
    return Manifest(
        tensors=tuple(
            TensorSpec(
                name=f"model.layers.{index}.mlp.down_proj.weight", shape=(rows, COLUMNS), dtype="float32"
            )
            for index in range(count)
        )
    )


def compare(megabytes: int, num_servers: int, repeats: int) -> tuple[float, float]:
    """Best seconds of the bare broadcast and of the transfer."""
    manifest = manifest_of(megabytes)
    buckets = plan_buckets(manifest, BUCKET_BYTES)
    tensors = [(spec.name, torch.randn(spec.shape)) for spec in manifest.tensors]
    whole = torch.zeros(manifest.num_bytes, dtype=torch.uint8)
    world_size = num_servers + 1
    store, port = open_store("127.0.0.1", world_size, DEADLINE_S)
    children = [
        subprocess.Popen(
            [sys.executable, __file__, "--receive"]
            + [str(number) for number in (port, rank, world_size, megabytes, repeats)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(1, world_size)
    ]
    group = WeightGroup.join(
        backend="gloo",
        store=store,
        rank=0,
        world_size=world_size,
        epoch=1,
        deadline_s=DEADLINE_S,
        host="127.0.0.1",
    )
    bare, transfer = [], []
    for _ in range(repeats + 1):
        bare.append(timed(children, lambda: group.send_bucket(whole, DEADLINE_S)))
        transfer.append(timed(children, lambda: send_tensors(group, manifest, buckets, tensors, DEADLINE_S)))
    group.close()
    for child in children:
        child.wait(DEADLINE_S)
    return min(bare[1:]), min(transfer[1:])


def timed(children: "list[subprocess.Popen[str]]", send: Callable[[], object]) -> float:
    """From the start until every receiver has said that it is done."""
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    started_s = time.monotonic()
    send()
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "done\n"
    return time.monotonic() - started_s


def receive(port: int, rank: int, world_size: int, megabytes: int, repeats: int) -> None:
    manifest = manifest_of(megabytes)
    buckets = plan_buckets(manifest, BUCKET_BYTES)
    memory = HostMemory(manifest)
    whole = torch.zeros(manifest.num_bytes, dtype=torch.uint8)
    group = WeightGroup.join(
        backend="gloo",
        store=("127.0.0.1", port),
        rank=rank,
        world_size=world_size,
        epoch=1,
        deadline_s=DEADLINE_S,
    )
    for _ in range(repeats + 1):
        with saying():
            group.receive_bucket(whole, DEADLINE_S)
        with saying(), memory.written_by(BENCHMARK) as copy:
            receive_into(group, manifest, buckets, copy.buffer, DEADLINE_S)
    group.close()


@contextmanager
def saying() -> Iterator[None]:
    """Tell the sender when this receiver is ready, and when it has everything."""
    print("ready", flush=True)
    yield
    print("done", flush=True)


def pause(repeats: int) -> dict[str, float]:
    """In a process of its own: an engine takes threads and memory with it."""
    program = Path(__file__).with_name("weight_sync_engine.py")
    done = subprocess.run(
        [sys.executable, str(program), "--repeats", str(repeats)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = done.stdout.strip().splitlines()
    print(*lines[:-1], sep="\n", flush=True)
    figures: dict[str, float] = json.loads(lines[-1])
    return figures


if __name__ == "__main__":
    main()
