"""A whole server over a scripted engine, and a sender of weights, in the test's own process and over real sockets."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asyppo_async.config.serve import ServeConfig
from asyppo_async.fleet.engine.scripted import Script, ScriptedEngine
from asyppo_async.fleet.serve import serve
from asyppo_async.fleet.stop import StopSignal
from asyppo_async.rpc.calls import CommitReport, GenerateCall, ProbeReport, SessionPlace, Way
from asyppo_async.rpc.client import FleetClient
from asyppo_async.rpc.security import OPEN, ClientSecurity
from asyppo_async.types import SamplingParams
from asyppo_async.weights.buckets import plan_buckets
from asyppo_async.weights.manifest import Manifest, manifest_of_checkpoint
from asyppo_async.weights.store import open_store
from asyppo_async.weights.transfer import SendReport, WeightGroup, send_tensors

DEADLINE_S = 20.0
UNTIL_S = 5.0
BUCKET_BYTES = 4096


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = {
        "model_type": "qwen3",
        "vocab_size": 64,
        "eos_token_id": 1,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    generator = torch.Generator().manual_seed(0)
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"]
    tensors = {name: torch.randn(64, 32, generator=generator) for name in names}
    save_file(tensors, folder / "model.safetensors")
    return folder


@dataclass
class Running:
    """A server that runs, with a client of it."""

    client: FleetClient
    engine: ScriptedEngine
    stop: StopSignal
    address: str
    manifest: Manifest
    task: "asyncio.Task[None]"


Serving = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture
def serving(model_folder: Path, tmp_path: Path) -> Serving:
    @contextlib.asynccontextmanager
    async def start(
        script: Script | None = None, security: ClientSecurity = OPEN, **settings: object
    ) -> AsyncIterator[Running]:
        ready = tmp_path / "ready.json"
        ready.unlink(missing_ok=True)
        config = ServeConfig.model_validate(
            {"model": model_folder, "port": 0, "ready_file": ready, "drain_grace_s": 0.3, "chunk_s": 0.02}
            | settings
        )
        engine = ScriptedEngine(script or Script())

        @contextlib.asynccontextmanager
        async def open_engine(_: ServeConfig) -> AsyncIterator[ScriptedEngine]:
            yield engine

        stop = StopSignal()
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(serve(config, open_engine, stop))
            while not ready.exists():
                if task.done():
                    await task
                await asyncio.sleep(0.01)
            address = f"127.0.0.1:{json.loads(ready.read_text())['port']}"
            async with FleetClient(address, security=security) as client:
                yield Running(
                    client=client,
                    engine=engine,
                    stop=stop,
                    address=address,
                    manifest=manifest_of_checkpoint(model_folder, "float32"),
                    task=task,
                )
            stop.received.set()

    return start


@dataclass
class Sender:
    """Rank 0 of a weight session with one server."""

    server: Running
    group: WeightGroup
    run_id: str
    epoch: int

    async def stage(self, version: int, value: float = 0.5) -> SendReport:
        tensors = [(spec.name, torch.full(spec.shape, value)) for spec in self.server.manifest.tensors]
        buckets = plan_buckets(self.server.manifest, BUCKET_BYTES)
        async with asyncio.TaskGroup() as tasks:
            sent = tasks.create_task(
                asyncio.to_thread(
                    send_tensors, self.group, self.server.manifest, buckets, tensors, DEADLINE_S
                )
            )
            received = tasks.create_task(self.server.client.weights.stage(self.epoch, version, DEADLINE_S))
        if received.result().checksums:  # the direct way compares at the commit
            assert received.result().checksums == sent.result().checksums
        return sent.result()

    async def commit(self, version: int, report: SendReport) -> CommitReport:
        return await self.server.client.weights.commit(
            self.epoch, version, report.checksums, "keep", DEADLINE_S
        )

    async def probe(self, version: int) -> ProbeReport:
        sampling = SamplingParams(
            temperature=1.0, top_p=1.0, top_k=0, min_tokens=0, max_tokens=8, stop_token_ids=()
        )
        fixed = [torch.arange(5, dtype=torch.int32).numpy()]
        return await self.server.client.weights.probe(self.epoch, version, fixed, fixed, sampling, DEADLINE_S)

    async def publish(self, version: int, passed: bool = True) -> None:
        await self.commit(version, await self.stage(version))
        await self.probe(version)
        await self.server.client.weights.verdict(self.epoch, version, passed, DEADLINE_S)


OpenSender = Callable[..., AbstractAsyncContextManager[Sender]]


@pytest.fixture
def sender() -> OpenSender:
    @contextlib.asynccontextmanager
    async def start(
        server: Running,
        run_id: str = "run",
        epoch: int = 1,
        incarnation: int = 0,
        lease_s: float = 30.0,
        way: Way = "staged",
    ) -> AsyncIterator[Sender]:
        store, port = await asyncio.to_thread(open_store, "127.0.0.1", 2, DEADLINE_S)
        place = SessionPlace(
            run_id=run_id,
            incarnation=incarnation,
            epoch=epoch,
            rank=1,
            world_size=2,
            backend="gloo",
            store_host="127.0.0.1",
            store_port=port,
            bucket_bytes=BUCKET_BYTES,
            lease_s=lease_s,
            way=way,
        )

        def meet() -> WeightGroup:
            return WeightGroup.join(
                backend="gloo", store=store, rank=0, world_size=2, epoch=epoch, deadline_s=DEADLINE_S
            )

        async with asyncio.TaskGroup() as tasks:
            opening = tasks.create_task(
                server.client.weights.open_session(place, server.manifest, DEADLINE_S)
            )
            meeting = tasks.create_task(asyncio.to_thread(meet))
        await opening
        group = meeting.result()
        try:
            yield Sender(server, group, run_id, epoch)
        finally:
            await asyncio.to_thread(group.close)

    return start


@pytest.fixture
def draw() -> Callable[..., GenerateCall]:
    def make(run_id: str = "", num_samples: int = 1, max_tokens: int = 40, **fields: object) -> GenerateCall:
        sampling = SamplingParams(
            temperature=float(fields.pop("temperature", 1.0)),  # type: ignore[arg-type]
            top_p=1.0,
            top_k=0,
            min_tokens=0,
            max_tokens=max_tokens,
            stop_token_ids=fields.pop("stop_token_ids", ()),  # type: ignore[arg-type]
        )
        values: dict[str, object] = {
            "run_id": run_id,
            "incarnation": 0,
            "request_id": "request",
            "prompt_id": "prompt",
            "prompt_token_ids": [3, 4, 5],
            "num_samples": num_samples,
            "sampling": sampling,
        }
        return GenerateCall(**(values | fields))  # type: ignore[arg-type]

    return make


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    async def wait(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(UNTIL_S):
            while not condition():  # noqa: ASYNC110  what a test waits for has no event of its own
                await asyncio.sleep(0.005)

    return wait
