"""Three more engines (untied and tied, float32 and bfloat16), each updated twice and then ended in another way."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from asyppo_async.errors import FleetUnavailable
from asyppo_async.rpc.calls import GenerateCall
from asyppo_async.rpc.client import FleetClient
from asyppo_async.types import SamplingParams
from asyppo_async.weights.host_copy import HostCopy
from asyppo_async.weights.manifest import Dtype

DEADLINE_S = 60.0
FLOORS: dict[Dtype, float] = {"float32": 1e-5, "bfloat16": 0.04}
"""Mean gap in nats: rounding of the type, through four layers of this model, on both sides."""

pytestmark = pytest.mark.engine


def long_call(run_id: str, num_samples: int, max_tokens: int) -> GenerateCall:
    sampling = SamplingParams(
        temperature=1.0, top_p=1.0, top_k=0, min_tokens=0, max_tokens=max_tokens, stop_token_ids=()
    )
    return GenerateCall(
        run_id=run_id,
        incarnation=0,
        request_id="request",
        prompt_id="prompt",
        prompt_token_ids=np.arange(3, 20, dtype=np.int32),
        num_samples=num_samples,
        sampling=sampling,
    )


async def check_updates(client: FleetClient, folder: Path, dtype: Dtype, open_trainer) -> None:
    """Two updates with other weights: the gap is the type's rounding, and far from that of the weights before."""
    async with open_trainer(client, folder, dtype, run_id="run", bucket_bytes=20_000) as trainer:
        for version in range(2):
            before = trainer.reference.logprobs(np.arange(3, 40, dtype=np.int32))
            trainer.reference.perturb(version, scale=0.05)
            after = trainer.reference.logprobs(np.arange(3, 40, dtype=np.int32))
            scored, sampled = await trainer.publish(version)
            assert scored.mean < FLOORS[dtype]
            assert sampled.mean < FLOORS[dtype]
            assert np.abs(after - before).mean() > 5 * FLOORS[dtype]


async def check_deltas(client: FleetClient, folder: Path, open_trainer) -> None:
    """Small steps of float32 masters, sent as deltas: the engine loads the changed modules alone, and agrees."""
    async with open_trainer(client, folder, "bfloat16", run_id="deltas") as trainer:
        masters = [parameter.detach().float() for parameter in trainer.reference.model.parameters()]
        copy = HostCopy.empty(trainer.manifest)
        copy.hold(0, trainer.tensors())
        await trainer.publish(0)
        generator = torch.Generator().manual_seed(0)
        for version in range(1, 4):
            # The last one leaves all but the norm at the end as it was: one module of the engine is loaded.
            for parameter, master in zip(trainer.reference.model.parameters(), masters, strict=True):
                if version < 3 or parameter is trainer.reference.model.model.norm.weight:
                    step = 0.25 if version == 3 else 1e-5
                    master.add_(step * torch.randn(master.shape, generator=generator).sign())
                    with torch.no_grad():
                        parameter.copy_(master)
            num_bytes = await trainer.stage_delta(version, copy)
            assert 0 < num_bytes < trainer.manifest.num_bytes / 20
            await trainer.commit(version, copy.checksums)
            scored, sampled = await trainer.probe(version)
            assert max(scored.mean, sampled.mean) < FLOORS["bfloat16"]
            await client.weights.verdict(trainer.epoch, version, True, DEADLINE_S)


async def left_after(pids: list[int], deadline_s: float, still_running) -> list[int]:
    """Those of the processes that have not ended by themselves in this time."""
    give_up_s = time.monotonic() + deadline_s
    while (left := still_running(pids)) and time.monotonic() < give_up_s:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return left


async def until_ended(running, deadline_s: float) -> int:
    return await asyncio.to_thread(running.process.wait, deadline_s)


def test_start_when_terminated_before_ready_then_it_ends_soon_and_leaves_nothing(
    make_model, tmp_path: Path
) -> None:
    log = tmp_path / "log.txt"
    script = Path(sys.executable).with_name("asyppo-fleet")
    command = [str(script), "serve", "--model", str(make_model(True, "float32")), "--port", "0"]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        give_up_s = time.monotonic() + 60
        while "starting the engine" not in log.read_text():
            assert process.poll() is None
            assert time.monotonic() < give_up_s
            time.sleep(0.05)
        time.sleep(2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert "Traceback" not in log.read_text()


async def test_untied_bfloat16_when_terminated_then_running_requests_finish_first(
    make_model, start_server, open_trainer
) -> None:
    folder = make_model(False, "bfloat16")
    with start_server(folder, "--dtype", "bfloat16", "--max-num-seqs", "8") as running:
        async with FleetClient(running.address) as client:
            await check_updates(client, folder, "bfloat16", open_trainer)
            async with asyncio.TaskGroup() as tasks:
                arrived = asyncio.Event()
                collecting = tasks.create_task(
                    client.collect(long_call("run", 4, 600), DEADLINE_S, lambda _: arrived.set())
                )
                await arrived.wait()
                running.process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.1)
                with pytest.raises(FleetUnavailable):
                    await client.collect(long_call("run", 1, 5), DEADLINE_S, lambda _: None)
            assert [len(response.token_ids) for response in collecting.result()] == [600] * 4
        assert await until_ended(running, 30) == 0


@pytest.mark.report("P48")
async def test_untied_float32_when_killed_then_no_child_is_left_after_5_s(
    make_model, start_server, open_trainer, still_running
) -> None:
    folder = make_model(False, "float32")
    with start_server(folder, "--max-num-seqs", "8") as running:
        async with FleetClient(running.address) as client:
            await check_updates(client, folder, "float32", open_trainer)
            children = running.descendants()
            assert len(children) >= 2
            async with client.generate(long_call("run", 500, 1000), DEADLINE_S) as stream:
                await anext(stream)
                running.process.kill()
                with pytest.raises(FleetUnavailable):
                    async for _ in stream:
                        pass
        assert await left_after(children, 5, still_running) == []


@pytest.mark.long
async def test_tied_bfloat16_when_versions_come_as_deltas_then_the_engine_agrees(
    make_model, start_server, open_trainer
) -> None:
    folder = make_model(True, "bfloat16")
    with start_server(folder, "--dtype", "bfloat16", "--max-num-seqs", "8") as running:
        async with FleetClient(running.address) as client:
            await check_deltas(client, folder, open_trainer)


async def test_tied_bfloat16_when_the_engine_dies_then_the_server_ends_with_its_error(
    make_model, start_server, open_trainer, still_running
) -> None:
    folder = make_model(True, "bfloat16")
    with start_server(folder, "--dtype", "bfloat16", "--max-num-seqs", "8") as running:
        async with FleetClient(running.address) as client:
            await check_updates(client, folder, "bfloat16", open_trainer)
            children = running.descendants()
            engine_core = next(pid for pid in children if _command(pid).startswith("VLLM::EngineCore"))
            async with client.generate(long_call("run", 500, 1000), DEADLINE_S) as stream:
                await anext(stream)
                os.kill(engine_core, signal.SIGKILL)
                with pytest.raises(FleetUnavailable):
                    async for _ in stream:
                        pass
        assert await until_ended(running, 30) == 1
        assert "error: vLLM's engine process died" in running.log.read_text()
        assert await left_after(children, 5, still_running) == []


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
