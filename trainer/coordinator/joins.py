"""The coordinator's only listener: servers that ask to join the run, where `fleet.listen` lets them."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from asyppo_async.config.hosts import is_loopback
from asyppo_async.config.sections import FleetSection
from asyppo_async.errors import ConfigError, FleetUnavailable
from asyppo_async.rpc.joining import JoinServicer, listening_for_joins, server_tls
from asyppo_async.rpc.security import ClientSecurity

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.1


@asynccontextmanager
async def open_joins(
    settings: FleetSection, run_id: str, security: ClientSecurity
) -> AsyncIterator[JoinServicer | None]:
    """Listen for the time of the block; None: `fleet.listen` is not set.

    Args:
        settings: The section of the run.
        run_id: That callers are told.
        security: The run's own; its token is the one that callers have to show.

    Raises:
        ConfigError: strangers could join, or the address cannot be bound.
    """
    if not settings.listen:
        yield None
        return
    host, _, port = settings.listen.rpartition(":")
    if not port.isdigit():
        raise ConfigError(f"fleet.listen is HOST:PORT, got {settings.listen!r}")
    if not (is_loopback(host) or security.token or settings.listen_insecure):
        raise ConfigError(
            f"fleet.listen = {settings.listen!r} can be reached from other machines: set fleet.token_file (or "
            "ASYPPO_FLEET_TOKEN), which joining servers then show too, or fleet.listen_insecure inside a closed network"
        )
    servicer = JoinServicer(run_id, security.token)
    credentials = server_tls(settings.listen_tls_cert, settings.listen_tls_key)
    async with listening_for_joins(settings.listen, servicer, credentials) as bound_port:
        _log.info("servers may join at %s:%d (asyppo-fleet serve --join)", host, bound_port)
        servicer.port = bound_port
        yield servicer


async def first_caller(joins: JoinServicer, timeout_s: float) -> str:
    """The address of the first server that asks.

    Raises:
        FleetUnavailable: none did in this time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while not joins.callers:  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_EVERY_S)
    except TimeoutError:
        raise FleetUnavailable(
            f"no server asked to join within {timeout_s:g} s; start one with `asyppo-fleet serve --join`, or name "
            "servers with --fleet"
        ) from None
    return next(iter(joins.callers))
