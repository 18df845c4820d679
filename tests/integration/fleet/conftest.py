"""Tiny models, real servers in their own processes, and a trainer's end of the weight session."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from asyppo_async.rpc.calls import CommitReport, GenerateCall, KvOnUpdate, SessionPlace, Way
from asyppo_async.rpc.client import FleetClient
from asyppo_async.trainer.worker.names import CheckpointNames
from asyppo_async.types import Float32Array, Int32Array, Response, SamplingParams
from asyppo_async.weights.buckets import plan_buckets
from asyppo_async.weights.delta_wire import send_delta
from asyppo_async.weights.host_copy import HostCopy
from asyppo_async.weights.manifest import Dtype, Manifest, manifest_of_checkpoint
from asyppo_async.weights.probe import ProbeGap, compare, fixed_sequences
from asyppo_async.weights.store import open_store
from asyppo_async.weights.transfer import WeightGroup, send_tensors

VOCAB_SIZE = 160
KV_BLOCK_TOKENS = 128
MAX_MODEL_LEN = 1024
KV_BYTES_PER_TOKEN = 4 * 2 * 2 * 32 * 4
"""Of the model below in float32: layers, keys and values, heads, head size, bytes."""
START_S = 240.0
DEADLINE_S = 60.0
TORCH_DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# What a model's author may have written there; none of it may reach the sampler.
HOSTILE_GENERATION_CONFIG = {
    "do_sample": True,
    "temperature": 0.3,
    "top_k": 3,
    "top_p": 0.5,
    "repetition_penalty": 1.7,
    "min_p": 0.2,
    "max_new_tokens": 7,
    "eos_token_id": [2, 3, 4, 5, 6, 7, 8, 9],
}


def sampling_of(
    max_tokens: int, stop_token_ids: tuple[int, ...] = (), temperature: float = 1.0
) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        top_p=1.0,
        top_k=0,
        min_tokens=0,
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
    )


MakeModel = Callable[[bool, Dtype], Path]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """A tiny Qwen3 (0.6 M parameters) with a hostile generation_config.json."""

    def make(tied: bool, dtype: Dtype) -> Path:
        folder = tmp_path_factory.mktemp(f"{'tied' if tied else 'untied'}-{dtype}")
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=MAX_MODEL_LEN,
            tie_word_embeddings=tied,
            initializer_range=0.1,
            eos_token_id=1,
            bos_token_id=None,
        )
        Qwen3ForCausalLM(config).to(TORCH_DTYPES[dtype]).save_pretrained(folder)
        (folder / "generation_config.json").write_text(json.dumps(HOSTILE_GENERATION_CONFIG))
        (folder / "tokenizer.json").write_text("{}")
        return folder

    return make


@dataclass
class ServerProcess:
    process: "subprocess.Popen[bytes]"
    address: str
    log: Path
    metrics_port: int | None = None

    @property
    def port(self) -> int:
        return int(self.address.rsplit(":", 1)[1])

    def descendants(self) -> list[int]:
        """Every process below the server's, by the kernel's table."""
        parents: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                    parents[int(entry.name)] = int(fields[1])
        found = [self.process.pid]
        for pid in found:
            found.extend(child for child, parent in parents.items() if parent == pid)
        return found[1:]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def serve_command(folder: Path, *options: str) -> list[str]:
    script = Path(sys.executable).with_name("asyppo-fleet")
    return [str(script), "serve", "--model", str(folder), "--num-threads", "1", *options]


StartServer = Callable[..., AbstractContextManager[ServerProcess]]


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> StartServer:
    @contextlib.contextmanager
    def start(folder: Path, *options: str) -> Iterator[ServerProcess]:
        place = tmp_path_factory.mktemp("server")
        ready, log = place / "ready.json", place / "log.txt"
        command = serve_command(folder, "--port", "0", "--ready-file", str(ready), *options)
        with log.open("wb") as output, started(command, output) as process:
            give_up_s = time.monotonic() + START_S
            while not ready.exists():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < give_up_s, log.read_text()
                time.sleep(0.1)
            place_of = json.loads(ready.read_text())
            assert place_of["pid"] == process.pid
            address = f"{place_of['host']}:{place_of['port']}"
            yield ServerProcess(process, address, log, place_of["metrics_port"])

    return start


@contextlib.contextmanager
def started(command: list[str], output: IO[bytes]) -> "Iterator[subprocess.Popen[bytes]]":
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    # A process group of its own, to which a test can send what a terminal sends.
    process = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def call_of(run_id: str, prompt: Int32Array, num_samples: int, sampling: SamplingParams) -> GenerateCall:
    return GenerateCall(
        run_id=run_id,
        incarnation=0,
        request_id="request",
        prompt_id="prompt",
        prompt_token_ids=prompt,
        num_samples=num_samples,
        sampling=sampling,
    )


class Reference:
    """The trainer's copy of the model, in transformers."""

    def __init__(self, folder: Path, dtype: Dtype) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=TORCH_DTYPES[dtype])
        self.manifest = manifest_of_checkpoint(folder, dtype)
        """What is sent of it."""

    def tensors(self, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
        """By their names in the checkpoint."""
        parameters = dict(self.model.named_parameters())
        of_checkpoint = CheckpointNames(self.model)
        wanted = [(name, parameters[name].detach()) for name in of_checkpoint.parameters(names)]
        return list(of_checkpoint.tensors(names, wanted))

    def perturb(self, seed: int, scale: float = 0.02) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                noise = torch.randn(parameter.shape, generator=generator) * scale
                parameter.add_(noise.to(parameter.dtype))

    def logprobs(self, token_ids: Int32Array, temperature: float = 1.0) -> Float32Array:
        """Log-prob of every token but the first: [len - 1]."""
        ids = torch.from_numpy(token_ids.astype(np.int64))[None]
        with torch.no_grad():
            logits = self.model(input_ids=ids, use_cache=False).logits.float() / temperature
        scored = logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        return scored.numpy()

    def response_logprobs(
        self, prompt: Int32Array, response: Response, temperature: float = 1.0
    ) -> Float32Array:
        return self.logprobs(np.concatenate([prompt, response.token_ids]), temperature)[len(prompt) - 1 :]


OnWire = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass
class Trainer:
    """Rank 0 of a session with one server."""

    client: FleetClient
    folder: Path
    dtype: Dtype
    reference: Reference
    group: WeightGroup
    run_id: str
    epoch: int
    bucket_bytes: int

    async def stage(self, version: int, wire: OnWire | None = None) -> tuple[int, ...]:
        """Send the reference's weights, each as `wire` makes it; returns the checksums of what was sent."""
        buckets = plan_buckets(self.manifest, self.bucket_bytes)
        tensors = [(name, tensor if wire is None else wire(name, tensor)) for name, tensor in self.tensors()]
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(
                asyncio.to_thread(send_tensors, self.group, self.manifest, buckets, tensors, DEADLINE_S)
            )
            tasks.create_task(self.client.weights.stage(self.epoch, version, DEADLINE_S))
        return sending.result().checksums

    async def stage_delta(self, version: int, copy: HostCopy) -> int:
        """Send what has changed since `copy`, which goes on to the new weights; returns the bytes that travelled."""
        base_version = copy.version
        assert base_version is not None
        delta = copy.advance(version, self.tensors())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(send_delta, self.group, delta, self.bucket_bytes, DEADLINE_S))
            staging = tasks.create_task(
                self.client.weights.stage(self.epoch, version, DEADLINE_S, base_version=base_version)
            )
        assert staging.result().checksums == copy.checksums
        return len(delta)

    @property
    def manifest(self) -> Manifest:
        return self.reference.manifest

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        return self.reference.tensors([spec.name for spec in self.manifest.tensors])

    async def commit(
        self, version: int, checksums: tuple[int, ...], kv_on_update: KvOnUpdate = "recompute"
    ) -> CommitReport:
        return await self.client.weights.commit(self.epoch, version, checksums, kv_on_update, DEADLINE_S)

    async def probe(self, version: int, *, long: Sequence[Int32Array] = ()) -> tuple[ProbeGap, ProbeGap]:
        """Gaps of the fixed sequences, with those of `long`, and of the sampled continuations."""
        fixed = fixed_sequences(version, VOCAB_SIZE, KV_BLOCK_TOKENS, MAX_MODEL_LEN - 1)
        prompts = [sequence[:17] for sequence in fixed]
        fixed += long
        report = await self.client.weights.probe(
            self.epoch, version, fixed, prompts, sampling_of(max_tokens=16), DEADLINE_S
        )
        scored = compare(
            np.concatenate(report.fixed_logprobs),
            np.concatenate([self.reference.logprobs(sequence) for sequence in fixed]),
        )
        pairs = zip(prompts, report.sampled, strict=True)
        sampled = compare(
            np.concatenate([response.behaviour_logprobs for response in report.sampled]),
            np.concatenate(
                [self.reference.response_logprobs(prompt, response) for prompt, response in pairs]
            ),
        )
        return scored, sampled

    async def publish(
        self, version: int, kv_on_update: KvOnUpdate = "recompute"
    ) -> tuple[ProbeGap, ProbeGap]:
        await self.commit(version, await self.stage(version), kv_on_update)
        gaps = await self.probe(version)
        await self.client.weights.verdict(self.epoch, version, True, DEADLINE_S)
        return gaps


OpenTrainer = Callable[..., AbstractAsyncContextManager[Trainer]]


@pytest.fixture(scope="session")
def open_trainer() -> OpenTrainer:
    @contextlib.asynccontextmanager
    async def start(
        client: FleetClient,
        folder: Path,
        dtype: Dtype,
        *,
        run_id: str,
        epoch: int = 1,
        bucket_bytes: int = 2**20,
        lease_s: float = 30.0,
        way: Way = "staged",
        reference: Reference | None = None,
        num_workers: int = 1,
    ) -> AsyncIterator[Trainer]:
        reference = reference or Reference(folder, dtype)
        world_size = 1 + num_workers
        store, port = await asyncio.to_thread(open_store, "127.0.0.1", world_size, DEADLINE_S)
        place = SessionPlace(
            run_id=run_id,
            incarnation=0,
            epoch=epoch,
            rank=1,
            world_size=world_size,
            backend="gloo",
            store_host="127.0.0.1",
            store_port=port,
            bucket_bytes=bucket_bytes,
            lease_s=lease_s,
            way=way,
        )

        def meet() -> WeightGroup:
            return WeightGroup.join(
                backend="gloo", store=store, rank=0, world_size=world_size, epoch=epoch, deadline_s=DEADLINE_S
            )

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(client.weights.open_session(place, reference.manifest, DEADLINE_S))
            meeting = tasks.create_task(asyncio.to_thread(meet))
        group = meeting.result()
        try:
            yield Trainer(client, folder, dtype, reference, group, run_id, epoch, bucket_bytes)
        finally:
            await asyncio.to_thread(group.close)

    return start


@pytest.fixture(scope="session")
def still_running() -> Callable[[list[int]], list[int]]:
    return lambda pids: [pid for pid in pids if is_running(pid)]


@pytest.fixture(scope="session")
def make_reference() -> Callable[[Path, Dtype], Reference]:
    return Reference
