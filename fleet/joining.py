"""`asyppo-fleet serve --join HOST:PORT`: asking a run's coordinator to use this server."""

import asyncio
import logging

from asyppo_async.config.hosts import is_loopback, is_wildcard
from asyppo_async.config.serve import ServeConfig
from asyppo_async.errors import AsyppoError, ConfigError
from asyppo_async.fleet.port import address_text
from asyppo_async.fleet.update_state import UpdateState
from asyppo_async.rpc.joining import ask_to_join
from asyppo_async.rpc.security import client_security
from asyppo_async.weights.store import address_towards

logger = logging.getLogger(__name__)

ASK_EVERY_S = 2.0
_DEADLINE_S = 5.0


def advertised(config: ServeConfig, port: int) -> str:
    """Where the coordinator reaches this server.

    Raises:
        ConfigError: it cannot: only this machine does, and the coordinator is on another one.
    """
    host, _, coordinator_port = config.join.rpartition(":")
    if not host or not coordinator_port.isdigit():
        raise ConfigError(
            f"--join takes the coordinator's HOST:PORT (fleet.listen of the run), got {config.join!r}"
        )
    if config.advertise:
        return (
            config.advertise
            if config.advertise.rpartition(":")[2].isdigit()
            else f"{config.advertise}:{port}"
        )
    if is_wildcard(config.host):
        return address_text(address_towards(host.strip("[]"), int(coordinator_port)), port)
    if is_loopback(config.host) and not is_loopback(host):
        raise ConfigError(
            f"this server listens on {config.host}, where the coordinator at {config.join} cannot reach it; use "
            "--host, or --advertise with an address that leads here"
        )
    return address_text(config.host, port)


async def keep_joining(config: ServeConfig, address: str, state: UpdateState) -> None:
    """Ask until a session is open here, and again when it has ended: the run may have lost this server meanwhile.

    Consumes: the state of the sessions. Produces: questions. Waits for: time. Never returns.
    """
    security = client_security(token_file=config.join_token_file, ca_file=config.join_tls_ca)
    said = ""
    while True:
        if state.open_session is None:
            try:
                run_id = await ask_to_join(config.join, address, security, _DEADLINE_S)
                words = f"run {run_id!r} at {config.join} knows this server as {address}"
                level = logging.INFO
            except AsyppoError as error:
                words, level = f"--join: {error}; asking again every {ASK_EVERY_S:g} s", logging.WARNING
            if words != said:
                logger.log(level, "%s", words)
                said = words
        await asyncio.sleep(ASK_EVERY_S)
