"""A fleet of real servers with scripted engines, and a sender with real bytes, for the publication tests."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
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
from asyppo_async.fleet.serve import StopSignal, serve
from asyppo_async.trainer.coordinator.membership import Expected, Fleet, RunIdentity, connect
from asyppo_async.trainer.coordinator.probing import ProbePlan, plan_probe
from asyppo_async.trainer.worker.messages import ActorForward, ActorForwardResult, SendResult, SessionStore
from asyppo_async.types import SamplingParams
from asyppo_async.weights.buckets import plan_buckets
from asyppo_async.weights.manifest import Manifest, TensorSpec, manifest_of_checkpoint
from asyppo_async.weights.transfer import WeightGroup, open_store, send_tensors

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
async def servers(model: Path, folder: Path, count: int = 1) -> AsyncIterator[list[Server]]:
    """Real servers in this process, each with an engine that a test can break."""
    started: list[Server] = []
    failure: BaseException | None = None
    async with asyncio.TaskGroup() as tasks:
        try:
            for index in range(count):
                started.append(await _start(tasks, model, folder / f"ready-{index}"))
            yield started
        except BaseException as error:
            failure = error
        finally:
            for server in started:
                server.stop.received.set()
    if failure is not None:
        raise failure


async def _start(tasks: asyncio.TaskGroup, model: Path, ready: Path) -> Server:
    engine = ScriptedEngine(Script(vocab_size=VOCAB_SIZE, max_model_len=MAX_LEN))
    stop = StopSignal()
    config = ServeConfig(model=model, port=0, ready_file=ready, max_num_seqs=16, drain_grace_s=0.1)

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
async def fleet_of(model: Path, folder: Path, count: int = 1) -> AsyncIterator[tuple[Fleet, list[Server]]]:
    async with AsyncExitStack() as stack:
        started = await stack.enter_async_context(servers(model, folder, count))
        addresses = [server.address for server in started]
        yield await stack.enter_async_context(connect(addresses, expected_of(model), RUN, 10.0)), started


def plan() -> ProbePlan:
    return plan_probe(
        prompts=[[5, 6, 7], [8, 9], [10, 11, 12, 13]],
        sampling=SAMPLING,
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_LEN,
        num_sequences=4,
        num_tokens=8,
        seed=0,
    )


@dataclass
class Sender:
    """What the actor group does, in threads of this process, scoring by the scripted engine's rule."""

    model: Path
    load: int = 0
    offsets: list[float] = field(default_factory=list)
    """Added to the scores of the next loads: a sender that disagrees with the engine."""
    corrupt: bool = False
    fail: str = ""
    delay_s: float = 0.0
    score_s: float = 0.0
    seen: list[str] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    extra: tuple[TensorSpec, ...] = ()
    _group: WeightGroup | None = None
    _store: Any = None

    async def manifest(self) -> Manifest:
        return Manifest(tensors=(*manifest_of_checkpoint(self.model, "float32").tensors, *self.extra))

    async def open_session(
        self, host: str, epoch: int, world_size: int, backend: Literal["gloo", "nccl"], deadline_s: float
    ) -> SessionStore:
        self._world_size = world_size
        self._store, port = await asyncio.to_thread(open_store, host, world_size, deadline_s)
        return SessionStore(host=host, port=port)

    async def join_session(self, epoch: int, deadline_s: float) -> None:
        self._group = await asyncio.to_thread(
            WeightGroup.join,
            backend="gloo",
            store=self._store,
            rank=0,
            world_size=self._world_size,
            epoch=epoch,
            deadline_s=deadline_s,
            host="127.0.0.1",
        )

    async def send_weights(self, version: int, deadline_s: float) -> SendResult:
        self.seen.append(f"send {version}")
        if self.fail:
            raise WorkerError(self.fail)
        await asyncio.sleep(self.delay_s)
        self.load += 1
        manifest = await self.manifest()
        assert self._group is not None
        tensors = [(spec.name, torch.full(spec.shape, float(version))) for spec in manifest.tensors]
        report = await asyncio.to_thread(
            send_tensors, self._group, manifest, plan_buckets(manifest, BUCKET_BYTES), tensors, deadline_s
        )
        checksums = (0, *report.checksums[1:]) if self.corrupt else report.checksums
        return SendResult(
            checksums=checksums, num_bytes=report.num_bytes, gather_s=report.gather_s, wire_s=report.wire_s
        )

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
        if self._group is not None:
            self._group.close()
