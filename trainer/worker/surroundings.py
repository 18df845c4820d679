"""What a worker's environment says to NCCL, gloo, OpenMP and launchers, told once at the start, with contradictions."""

import os
import socket
from collections.abc import Mapping, Sequence

_TOLD = ("NCCL_", "GLOO_", "TORCH_NCCL_", "OMP_", "MKL_NUM", "KMP_", "CUDA_VISIBLE", "CUDA_LAUNCH", "UCX_NET")
_PLACES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE")
_PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "grpc_proxy", "all_proxy", "ALL_PROXY")
_SLOW = {
    "NCCL_P2P_DISABLE": "GPUs of one machine talk through host memory",
    "NCCL_SHM_DISABLE": "ranks of one machine talk over the network",
    "NCCL_IB_DISABLE": "machines talk over TCP",
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
}
_LOOPBACK = ("127.", "::1", "localhost")


def told(environment: Mapping[str, str]) -> str:
    """The settings that act on ranks, in one line."""
    found = [f"{name}={value}" for name, value in sorted(environment.items()) if name.startswith(_TOLD)]
    return "environment: " + (" ".join(found) or "nothing set for NCCL, gloo or OpenMP")


def contradictions(
    environment: Mapping[str, str],
    *,
    interfaces: Sequence[str],
    connect_host: str,
    num_ranks: int,
    num_cores: int,
) -> list[str]:
    """What cannot be meant, or has no effect, or is slow; each with what to do.

    Args:
        environment: of the process.
        interfaces: names of this machine's networks.
        connect_host: the coordinator's address.
        num_ranks: that start here.
        num_cores: that they may use.
    """
    words = []
    chosen = environment.get("NCCL_SOCKET_IFNAME", "")
    if chosen and not (matching := _matching(chosen, interfaces)):
        words.append(
            f"NCCL_SOCKET_IFNAME={chosen} names no interface of this machine ({', '.join(interfaces)}): NCCL will find "
            "no network; unset it or name one of these"
        )
    elif chosen and matching == ["lo"] and not connect_host.startswith(_LOOPBACK):
        words.append(
            f"NCCL_SOCKET_IFNAME={chosen} is loopback, and the run is on {connect_host}: ranks of other machines "
            "cannot be reached; unset it or name the interface towards them"
        )
    if environment.get("GLOO_SOCKET_IFNAME"):
        words.append("GLOO_SOCKET_IFNAME has no effect: gloo binds the address towards the run, or --host")
    if environment.get("NCCL_IB_DISABLE", "0") != "0" and environment.get("NCCL_IB_HCA"):
        words.append("NCCL_IB_DISABLE turns off what NCCL_IB_HCA chooses among; unset one of them")
    if places := [name for name in _PLACES if name in environment]:
        words.append(
            f"{', '.join(places)} of another launcher: not read, the coordinator gives every rank its place"
        )
    if proxies := [name for name in _PROXIES if environment.get(name)]:
        words.append(f"{', '.join(proxies)}: not used, what belongs to a run connects directly")
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) * num_ranks > num_cores:
        words.append(
            f"OMP_NUM_THREADS={threads} for each of {num_ranks} ranks is more than the {num_cores} cores that they may "
            "use; lower it, or set num_threads of actor and critic"
        )
    if environment.get("OMP_WAIT_POLICY", "PASSIVE").upper() == "ACTIVE":
        words.append(
            "OMP_WAIT_POLICY=ACTIVE: waiting threads spin, and take the cores from ranks beside them; use PASSIVE"
        )
    words += [
        f"{name}={environment[name]}: {why}, which is slow; unset it but for a search for errors"
        for name, why in _SLOW.items()
        if environment.get(name, "0") not in ("", "0")
    ]
    return words


def lines_about(connect_host: str, num_ranks: int) -> list[str]:
    """Of this process."""
    warnings = contradictions(
        os.environ,
        interfaces=[name for _, name in socket.if_nameindex()],
        connect_host=connect_host,
        num_ranks=num_ranks,
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )
    return [told(os.environ), *(f"warning: {line}" for line in warnings)]


def _matching(chosen: str, interfaces: Sequence[str]) -> list[str]:
    """As NCCL reads it: prefixes, `=` before exact names, `^` before those to leave out."""
    names = chosen.lstrip("^=").split(",")
    if "=" in chosen[:2]:
        found = [interface for interface in interfaces if interface in names]
    else:
        found = [interface for interface in interfaces if interface.startswith(tuple(names))]
    return [interface for interface in interfaces if interface not in found] if chosen[0] == "^" else found
