"""The three ways to generate that `fleet_overhead.py` compares, each behind `generate` and `frontend_cpu_s`.

Engine processes are pinned to one core, and what stands between them and the caller to another one.
"""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import psutil
import uvloop

from asyppo_async.config.serve import ServeConfig
from asyppo_async.fleet.engine.vllm_options import engine_args, prepare_environment, request_params
from asyppo_async.rpc.pool import FleetPool
from asyppo_async.types import SamplingParams

START_S = 300
CALL_S = 3600
GROUP_SIZE = 8
"""Samples of a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    model: Path
    engine_core: int
    frontend_core: int
    max_num_seqs: int
    max_model_len: int
    stream_interval: int
    kv_cache_gib: float


class Contender(Protocol):
    async def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> int:
        """`GROUP_SIZE` samples of `num_tokens` tokens of every prompt, with log-probs; how many tokens came."""
        ...

    def frontend_cpu_s(self) -> float:
        """CPU time so far of everything but the engine's own processes."""
        ...


@contextlib.asynccontextmanager
async def in_process(setting: Setting) -> AsyncIterator[Contender]:
    """`AsyncLLM` in a process of its own, told the batch and asked for its end only: nothing is streamed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.fleet_contenders",
        json.dumps(_plain(setting)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        await _answer(process, START_S)
        _pin(process.pid, setting)
        yield _InProcess(process)
    finally:
        _end(process.pid)
        await process.wait()


@contextlib.asynccontextmanager
async def our_server(setting: Setting) -> AsyncIterator[Contender]:
    """`asyppo-fleet serve` over loopback, and the client pool in this process."""
    port = _free_port()
    options = {
        "model": setting.model,
        "port": port,
        "max-num-seqs": setting.max_num_seqs,
        "max-model-len": setting.max_model_len,
        "kv-cache-gib": setting.kv_cache_gib,
        "stream-interval": setting.stream_interval,
        "num-threads": 1,
        "probe-slots": 1,
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    command = [str(Path(sys.executable).with_name("asyppo-fleet")), "serve", *flags]
    with _running(command) as server:
        await _until_open(port, server)
        async with FleetPool([f"127.0.0.1:{port}"]) as pool:
            await pool.vocab_size(START_S)
            _pin(server.pid, setting)
            yield _OurServer(pool, server.pid)


@contextlib.asynccontextmanager
async def http_server(setting: Setting) -> AsyncIterator[Contender]:
    """vLLM's own OpenAI server, asked for token ids and log-probs, whole responses."""
    port = _free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={setting.model}", f"--port={port}",
        "--host=127.0.0.1", "--dtype=float32", f"--max-num-seqs={setting.max_num_seqs}", "--enforce-eager",
        f"--max-model-len={setting.max_model_len}", "--generation-config=vllm", "--logprobs-mode=processed_logprobs",
        f"--stream-interval={setting.stream_interval}", "--distributed-executor-backend=mp", "--served-model-name=m",
        f"--kv-cache-memory-bytes={int(setting.kv_cache_gib * 2**30)}", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    with _running(command, **environment, VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1") as server:
        await _until_open(port, server)
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=CALL_S)
        async with aiohttp.ClientSession(
            f"http://127.0.0.1:{port}", connector=connector, timeout=timeout
        ) as http:
            _pin(server.pid, setting)
            yield _HttpServer(http, server.pid)


@dataclass
class _InProcess:
    process: asyncio.subprocess.Process

    async def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> int:
        assert self.process.stdin is not None
        line = json.dumps({"prompts": prompts, "num_tokens": num_tokens})
        self.process.stdin.write(line.encode() + b"\n")
        await self.process.stdin.drain()
        return int((await _answer(self.process, CALL_S))["num_tokens"])

    def frontend_cpu_s(self) -> float:
        return _cpu_s(self.process.pid)


@dataclass
class _OurServer:
    pool: FleetPool
    process_id: int

    async def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> int:
        sampling = SamplingParams(
            temperature=1.0, top_p=1.0, top_k=0, min_tokens=0, max_tokens=num_tokens, stop_token_ids=()
        )
        asked = [
            self.pool.generate(prompt, num_samples=GROUP_SIZE, sampling=sampling, deadline_s=CALL_S)
            for prompt in prompts
        ]
        groups = await asyncio.gather(*asked)
        return sum(len(response.behaviour_logprobs) for group in groups for response in group)

    def frontend_cpu_s(self) -> float:
        return _cpu_s(self.process_id) + _cpu_s(os.getpid())


@dataclass
class _HttpServer:
    http: aiohttp.ClientSession
    process_id: int

    async def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> int:
        async def ask(prompt: list[int]) -> int:
            body = {
                "model": "m", "prompt": prompt, "n": GROUP_SIZE, "max_tokens": num_tokens, "temperature": 1.0,
                "ignore_eos": True, "logprobs": 0, "return_token_ids": True,
            }  # fmt: skip
            async with self.http.post("/v1/completions", json=body) as answer:
                answer.raise_for_status()
                choices = (await answer.json())["choices"]
            return sum(len(choice["logprobs"]["token_logprobs"]) for choice in choices)

        return sum(await asyncio.gather(*map(ask, prompts)))

    def frontend_cpu_s(self) -> float:
        return _cpu_s(self.process_id) + _cpu_s(os.getpid())


def _serve_in_process(setting: Setting) -> None:
    """The child of `in_process`: a batch a line in, its number of tokens a line out."""
    config = ServeConfig(
        model=setting.model,
        max_num_seqs=setting.max_num_seqs,
        max_model_len=setting.max_model_len,
        kv_cache_gib=setting.kv_cache_gib,
        stream_interval=setting.stream_interval,
        num_threads=1,
    )
    prepare_environment(config)
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415  after the environment is set
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    async def run() -> None:
        llm = AsyncLLM.from_engine_args(engine_args(config))
        count = 0

        async def one(prompt: list[int], num_tokens: int) -> int:
            nonlocal count
            count += 1
            sampling = SamplingParams(
                temperature=1.0, top_p=1.0, top_k=0, min_tokens=0, max_tokens=num_tokens, stop_token_ids=()
            )
            params: Any = request_params(sampling, num_tokens)
            params.output_kind = RequestOutputKind.FINAL_ONLY
            async for output in llm.generate({"prompt_token_ids": prompt}, params, f"sample-{count}"):
                if output.finished:
                    assert len(output.outputs[0].logprobs) == num_tokens
                    return len(output.outputs[0].token_ids)
            raise AssertionError("a sample without an end")

        await one([1, 2, 3], 4)
        print(json.dumps({"ready": True}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            batch = json.loads(line)
            samples = [prompt for prompt in batch["prompts"] for _ in range(GROUP_SIZE)]
            counts = await asyncio.gather(*(one(prompt, batch["num_tokens"]) for prompt in samples))
            print(json.dumps({"num_tokens": sum(counts)}), flush=True)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


async def _answer(process: asyncio.subprocess.Process, deadline_s: float) -> dict[str, Any]:
    """The next line of JSON; what vLLM prints beside is passed over."""
    assert process.stdout is not None
    async with asyncio.timeout(deadline_s):
        while line := await process.stdout.readline():
            if line.startswith(b"{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
    raise RuntimeError("the in-process engine has ended")


@contextlib.contextmanager
def _running(command: list[str], **environment: str) -> Any:
    server = subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
    try:
        yield server
    finally:
        _end(server.pid)
        server.wait()


async def _until_open(port: int, server: subprocess.Popen[bytes]) -> None:
    ends_at_s = time.monotonic() + START_S
    while time.monotonic() < ends_at_s:
        if server.poll() is not None:
            raise RuntimeError(f"{server.args!r} ended with exit code {server.returncode}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        await asyncio.sleep(0.5)
    raise TimeoutError(f"{server.args!r} did not listen within {START_S} s")


def _pin(process_id: int, setting: Setting) -> None:
    """Every thread of the process to the frontend's core, every thread of its descendants to the engine's."""
    frontend = psutil.Process(process_id)
    for process, core in (
        (frontend, setting.frontend_core),
        *((c, setting.engine_core) for c in frontend.children(recursive=True)),
    ):
        for thread in process.threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, {core})


def _cpu_s(process_id: int) -> float:
    times = psutil.Process(process_id).cpu_times()
    return float(times.user + times.system)


def _end(process_id: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(process_id)
        for one in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _plain(setting: Setting) -> dict[str, Any]:
    return {name: getattr(setting, name) for name in Setting.__slots__} | {"model": str(setting.model)}


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    _serve_in_process(Setting(**arguments | {"model": Path(arguments["model"])}))
