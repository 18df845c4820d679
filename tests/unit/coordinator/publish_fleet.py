"""A fleet of real servers with scripted engines, and a sender with real bytes, for the publication tests."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file

from asyppo_async.config.sections import WeightsSection
from asyppo_async.config.serve import ServeConfig
from asyppo_async.errors import WorkerError
from asyppo_async.fingerprint import model_identity
from asyppo_async.fleet.engine.scripted import Script, ScriptedEngine
from asyppo_async.fleet.serve import serve
from asyppo_async.fleet.stop import StopSignal
from asyppo_async.trainer.coordinator.connecting import connect
from asyppo_async.trainer.coordinator.membership import Fleet, RunIdentity
from asyppo_async.trainer.coordinator.probing import ProbePlan, plan_probe
from asyppo_async.trainer.coordinator.server_check import Expected
from asyppo_async.trainer.worker.messages import ActorForward, ActorForwardResult
from asyppo_async.trainer.worker.sender import Sender as WorkerSender
from asyppo_async.trainer.worker.session_messages import (
    JoinSession,
    OpenSession,
    SendResult,
    SendWeights,
    SessionStore,
)
from asyppo_async.types import SamplingParams
from asyppo_async.weights.manifest import Dtype, Manifest, TensorSpec, manifest_of_checkpoint

MarkedBy = Literal["load", "version"]

VOCAB_SIZE = 64
MAX_LEN = 512
BUCKET_BYTES = 4096
RUN = RunIdentity(run_id="run", incarnation=1)
SAMPLING = SamplingParams(temperature=0.7, top_p=1.0, top_k=0, min_tokens=0, max_tokens=64, stop_token_ids=())
SETTINGS = WeightsSection(bucket_bytes=BUCKET_BYTES, min_deadline_s=5.0, lease_s=5.0)


def write_model(folder: Path, *, rows: int = VOCAB_SIZE, vocabulary: tuple[str, ...] = ("a", "b")) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 16,
        "vocab_size": rows,
        "max_position_embeddings": MAX_LEN,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    vocab = {token: index for index, token in enumerate(vocabulary)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordLevel", "vocab": vocab}}))
    tensors = {
        "model.embed_tokens.weight": torch.zeros(rows, 16),
        "model.layers.0.self_attn.q_proj.weight": torch.zeros(100, 16),
        "model.layers.0.self_attn.k_proj.weight": torch.zeros(50, 16),
        "model.norm.weight": torch.zeros(16),
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


@dataclass
class Server:
    address: str
    engine: ScriptedEngine
    stop: StopSignal


@asynccontextmanager
async def servers(
    model: Path,
    folder: Path,
    count: int = 1,
    marked_by: MarkedBy = "load",
    dtype: Dtype = "float32",
    num_experts: int = 0,
) -> AsyncIterator[list[Server]]:
    """Real servers in this process, each with an engine that a test can break."""
    started: list[Server] = []
    failure: BaseException | None = None
    async with asyncio.TaskGroup() as tasks:
        try:
            for index in range(count):
                started.append(
                    await start(
                        tasks,
                        model,
                        folder / f"ready-{index}",
                        marked_by,
                        dtype=dtype,
                        num_experts=num_experts,
                    )
                )
            yield started
        except BaseException as error:
            failure = error
        finally:
            for server in started:
                server.stop.received.set()
    if failure is not None:
        raise failure


async def start(
    tasks: asyncio.TaskGroup,
    model: Path,
    ready: Path,
    marked_by: MarkedBy,
    port: int = 0,
    delay_s: float = 0.0,
    dtype: Dtype = "float32",
    join: str = "",
    num_experts: int = 0,
    **settings: Any,
) -> Server:
    """`settings`: further ones of the server."""
    engine = ScriptedEngine(
        Script(
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_LEN,
            marked_by=marked_by,
            delta_delay_s=delay_s,
            num_experts=num_experts,
        )
    )
    stop = StopSignal()
    config = ServeConfig(
        model=model,
        port=port,
        ready_file=ready,
        max_num_seqs=16,
        drain_grace_s=0.1,
        dtype=dtype,
        join=join,
        **settings,
    )

    @asynccontextmanager
    async def opened(_: ServeConfig) -> AsyncIterator[ScriptedEngine]:
        yield engine

    tasks.create_task(serve(config, opened, stop))
    port = await asyncio.to_thread(_port_in, ready)
    return Server(address=f"127.0.0.1:{port}", engine=engine, stop=stop)


def _port_in(ready: Path) -> int:
    deadline_at_s = time.monotonic() + 10
    while not ready.exists() and time.monotonic() < deadline_at_s:
        time.sleep(0.01)
    return int(json.loads(ready.read_text())["port"])


def expected_of(model: Path, **changes: Any) -> Expected:
    values = {"identity": model_identity(model), "dtype": "float32", "longest_tokens": 100}
    return Expected(**{**values, **changes})


@asynccontextmanager
async def fleet_of(
    model: Path, folder: Path, count: int = 1, marked_by: MarkedBy = "load", dtype: Dtype = "float32"
) -> AsyncIterator[tuple[Fleet, list[Server]]]:
    async with AsyncExitStack() as stack:
        started = await stack.enter_async_context(servers(model, folder, count, marked_by, dtype))
        addresses = [server.address for server in started]
        yield (
            await stack.enter_async_context(
                connect(addresses, expected_of(model, dtype=dtype), RUN, 10.0, debug=True)
            ),
            started,
        )


def plan() -> ProbePlan:
    return plan_probe(
        prompts=[[5, 6, 7], [8, 9], [10, 11, 12, 13]],
        sampling=SAMPLING,
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_LEN,
        longest_tokens=300,
        num_sequences=4,
        num_tokens=8,
        seed=0,
    )


@dataclass
class Sender:
    """What the actor group does, in threads of this process, scoring by the scripted engine's rule."""

    model: Path
    load: int = 0
    marked_by: MarkedBy = "load"
    dtype: Dtype = "float32"
    bucket_bytes: int = BUCKET_BYTES
    offsets: list[float] = field(default_factory=list)
    """Added to the scores of the next loads: a sender that disagrees with the engine."""
    corrupt: bool = False
    fail: str = ""
    delay_s: float = 0.0
    score_s: float = 0.0
    seen: list[str] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    extra: tuple[TensorSpec, ...] = ()
    change: Callable[[str, torch.Tensor, int], torch.Tensor] | None = None
    """Of each tensor, from the one before it, by name and version; None: all are filled with the version."""
    sent: list[SendResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        manifest = manifest_of_checkpoint(self.model, self.dtype)
        self.worker = WorkerSender(Filled(manifest, self), bucket_bytes=self.bucket_bytes, rank=0)
        self.tensor_of = {spec.name: torch.zeros(spec.shape) for spec in manifest.tensors}

    async def manifest(self) -> Manifest:
        return Manifest(tensors=(*self.worker.manifest.tensors, *self.extra))

    async def open_session(
        self, host: str, epoch: int, world_size: int, backend: Literal["gloo", "nccl"], deadline_s: float
    ) -> SessionStore:
        request = OpenSession(
            host=host, epoch=epoch, world_size=world_size, backend=backend, deadline_s=deadline_s
        )
        return await asyncio.to_thread(self.worker.open, request)

    async def join_session(self, epoch: int, deadline_s: float) -> None:
        await asyncio.to_thread(self.worker.join, JoinSession(epoch=epoch, deadline_s=deadline_s))

    def on_device(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def send_weights(
        self,
        version: int,
        deadline_s: float,
        *,
        base_version: int = -1,
        keep: bool = False,
        folder: str = "",
    ) -> SendResult:
        self.seen.append(f"send {version}")
        if self.fail:
            raise WorkerError(self.fail)
        await asyncio.sleep(self.delay_s)
        self.load = self.load + 1 if self.marked_by == "load" else version
        for name, tensor in self.tensor_of.items():
            if self.change is None:
                self.tensor_of[name] = torch.full(tensor.shape, float(version))
            else:
                self.tensor_of[name] = self.change(name, tensor, version)
        request = SendWeights(
            version=version, deadline_s=deadline_s, base_version=base_version, keep=keep, folder=folder
        )
        result = await asyncio.to_thread(self.worker.send, request)
        self.sent.append(result)
        return replace(result, checksums=(0, *result.checksums[1:])) if self.corrupt else result

    async def forward(self, request: ActorForward) -> ActorForwardResult:
        fixed = request.temperature == 1.0
        self.seen.append("score fixed" if fixed else "score sampled")
        self.temperatures.append(request.temperature)
        await asyncio.sleep(self.score_s)
        offset = self.offsets[0] if self.offsets else 0.0
        if not fixed and self.offsets:
            self.offsets.pop(0)
        positions = np.concatenate([np.arange(length) for length in request.sequences.response_lengths])
        scores = -(1.0 + self.load + (0.0 if fixed else positions / 1000.0)) + offset
        logprobs = np.broadcast_to(scores, positions.shape).astype(np.float32)
        return ActorForwardResult(logprobs=logprobs, entropies=np.zeros_like(logprobs), compute_s=0.0)

    async def close_session(self) -> None:
        self.seen.append("close")
        self.worker.close()


@dataclass(frozen=True)
class Filled:
    """What a `Sender` publishes: its tensors as they are."""

    manifest: Manifest
    sender: Sender

    def tensors(self, *, here: bool) -> Iterator[tuple[str, torch.Tensor]]:
        assert here
        return ((spec.name, self.sender.tensor_of[spec.name]) for spec in self.manifest.tensors)
