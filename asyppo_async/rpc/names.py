"""Where a fleet's servers are: addresses as they stand, and `dns:///name:port` for every address of a name.

Names are resolved by us and not by gRPC: weights go to every server, so each needs a channel of its own.
"""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Sequence

from asyppo_async.errors import ConfigError, FleetUnavailable

SCHEME = "dns:///"
LOOK_EVERY_S = 2.0
"""How often a name is resolved again, and a lost server looked for."""

Resolve = Callable[[Sequence[str]], Awaitable[tuple[str, ...]]]


def is_name(target: str) -> bool:
    return target.startswith(SCHEME)


def check_targets(targets: Sequence[str]) -> None:
    """Raise `ConfigError` for a name without a port, or for no target at all."""
    if not targets:
        raise ConfigError("no server is named")
    for target in filter(is_name, targets):
        _host_and_port(target)


async def addresses_of(targets: Sequence[str]) -> tuple[str, ...]:
    """`host:port` of every target, in their order; those of one name sorted.

    Raises:
        ConfigError: a name without a port.
        FleetUnavailable: a name does not resolve now.
    """
    found: list[str] = []
    for target in targets:
        found += await _resolved(target) if is_name(target) else [target]
    return tuple(found)


async def addresses_within(targets: Sequence[str], resolve: Resolve, deadline_s: float) -> tuple[str, ...]:
    """The addresses, tried until all names resolve: a name may have nobody before its first server is up.

    Raises:
        ConfigError: a name without a port.
        FleetUnavailable: a name did not resolve within the deadline.
    """
    ends_at_s = time.monotonic() + deadline_s
    while True:
        try:
            return await resolve(targets)
        except FleetUnavailable as error:
            if time.monotonic() + LOOK_EVERY_S > ends_at_s:
                raise FleetUnavailable(f"{error}, tried for {deadline_s:g} s; correct the name") from None
        await asyncio.sleep(LOOK_EVERY_S)


async def _resolved(target: str) -> list[str]:
    host, port = _host_and_port(target)
    try:
        entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise FleetUnavailable(f"{target} does not resolve: {error.strerror or error}") from error
    hosts = sorted({str(address[0]) for *_, address in entries})
    return [f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in hosts]


def _host_and_port(target: str) -> tuple[str, int]:
    host, _, port = target.removeprefix(SCHEME).rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"{target}: a name and a port are needed, as in {SCHEME}fleet:50051")
    return host.strip("[]"), int(port)
