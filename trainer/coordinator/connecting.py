"""The fleet of a run, made from addresses: every server waited for and checked."""

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from asyppo_async.concurrency import beside
from asyppo_async.errors import ConfigError, FleetMismatch
from asyppo_async.rpc.client import FleetClient
from asyppo_async.rpc.joining import JoinServicer
from asyppo_async.rpc.member import Member
from asyppo_async.rpc.names import Resolve, addresses_of, addresses_within
from asyppo_async.rpc.pulse import SILENCE_S
from asyppo_async.rpc.security import OPEN, ClientSecurity
from asyppo_async.trainer.coordinator.membership import Fleet, RunIdentity
from asyppo_async.trainer.coordinator.parties import all_parties
from asyppo_async.trainer.coordinator.rejoining import Joining
from asyppo_async.trainer.coordinator.server_check import Expected, check_joining

_log = logging.getLogger(__name__)


@asynccontextmanager
async def connect(
    targets: Sequence[str],
    expected: Expected,
    run: RunIdentity,
    join_timeout_s: float,
    security: ClientSecurity = OPEN,
    *,
    silence_s: float = SILENCE_S,
    resolve: Resolve = addresses_of,
    joins: JoinServicer | None = None,
    debug: bool,
) -> AsyncIterator[Fleet]:
    """Wait for every server, check each, and hold the channels until the block is left.

    Meanwhile servers that were lost and come back join again, and those that come under a name (`dns:///name:port`), or
    that ask (`joins`).

    Raises:
        FleetUnavailable: a server is not there, not ready, or its name unknown, within `join_timeout_s`.
        FleetMismatch: a server has another model, tokenizer, vocabulary, type or length; names both sides.
        ConfigError: no address, or one that comes twice.
    """
    addresses = await addresses_within(targets, resolve, join_timeout_s)
    repeated = sorted({address for address in addresses if addresses.count(address) > 1})
    if repeated or not addresses:
        raise ConfigError(
            f"fleet.servers: {f'{repeated[0]} comes twice' if repeated else 'no server is named'}"
        )

    def client_of(address: str) -> FleetClient:
        return FleetClient(address, security=security, silence_s=silence_s)

    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client_of(address)) for address in addresses]
        infos = await all_parties([check_joining(client, expected, join_timeout_s) for client in clients])
        members = [Member(client, info) for client, info in zip(clients, infos, strict=True)]
        by_server: dict[str, Member] = {}
        for member in members:
            other = by_server.setdefault(member.info.server_id, member)
            if other is not member:
                raise FleetMismatch(f"{other.address} and {member.address} are the same server; name it once")
        _log.info("fleet of %d: %s", len(members), ", ".join(member.address for member in members))
        fleet = Fleet(members, run, debug=debug, routed_experts=expected.routed_experts)
        joining = Joining(fleet, expected, targets, client_of, resolve, joins)
        await stack.enter_async_context(beside(joining.run()))
        yield fleet
