"""Where the ranks of a weight session meet: rank 0's store, on one address, and the way to it."""

import socket
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from asyppo_async.errors import WeightSyncError

_SHORTEST_WAIT_S = 0.001
"""What is left of a deadline that has passed: torch reads zero as "no limit"."""


def open_store(host: str, world_size: int, deadline_s: float) -> tuple[Store, int]:
    """Start the store of a session at rank 0, on a free port of the address `host` alone.

    Returns:
        The store, and the port that the others connect to.

    Raises:
        WeightSyncError: the address is not one of this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind(address)
            listener.listen(world_size + 16)
            port = int(listener.getsockname()[1])
            file_descriptor = listener.detach()
    except OSError as error:
        raise WeightSyncError(f"the weight store cannot listen on {host}: {error}") from error
    store = TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=duration(deadline_s),
        wait_for_workers=False,
        master_listen_fd=file_descriptor,
    )
    return store, port


def address_towards(host: str, port: int) -> str:
    """The address of this machine from which `host` is reached; no packet is sent."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise WeightSyncError(f"no way to the weight store at {host}:{port}: {error}") from error


def duration(seconds: float) -> timedelta:
    """A time limit as torch takes it."""
    return timedelta(seconds=max(seconds, _SHORTEST_WAIT_S))
