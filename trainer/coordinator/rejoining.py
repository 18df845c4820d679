"""Servers that come: those that were lost and are back, new ones of a name, and those that ask to join."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from asyppo_async.errors import FleetError
from asyppo_async.rpc.client import FleetClient
from asyppo_async.rpc.info import ServerInfo
from asyppo_async.rpc.joining import JoinServicer
from asyppo_async.rpc.member import ENDING, INFO_DEADLINE_S, Member
from asyppo_async.rpc.names import LOOK_EVERY_S, Resolve, is_name
from asyppo_async.trainer.coordinator.membership import Fleet
from asyppo_async.trainer.coordinator.server_check import Expected, differences_of

_log = logging.getLogger(__name__)


class Joining:
    """Lets servers that come join; the next publication brings them up to date."""

    def __init__(
        self,
        fleet: Fleet,
        expected: Expected,
        targets: Sequence[str],
        open_client: Callable[[str], FleetClient],
        resolve: Resolve,
        joins: JoinServicer | None,
    ) -> None:
        """`targets`: as the user named them; `open_client`: makes a client of an address, not opened; `joins`: None
        where nobody may ask.
        """
        self._fleet = fleet
        self._expected = expected
        self._names = tuple(filter(is_name, targets))
        self._open_client = open_client
        self._resolve = resolve
        self._joins = joins
        self._refused: set[str] = set()

    async def run(self) -> None:
        """Consumes: answers of servers and resolvers. Produces: joins. Waits for: time, since nothing tells that a
        server is back. Never returns.
        """
        async with AsyncExitStack() as stack:
            while True:
                await asyncio.sleep(LOOK_EVERY_S)
                for member in self._fleet.members:
                    if self._fleet.state.is_lost(member.address):
                        await self._look_for(member)
                if self._names:
                    await self._look_up(stack)
                if self._joins is not None:
                    await self._meet_all(tuple(self._joins.callers), stack)

    async def _look_for(self, member: Member) -> None:
        info = await self._fitting(member.client)
        if info is not None:
            _log.info("server %s is back; the next publication brings it up to date", member.address)
            self._fleet.rejoin(member, info)

    async def _look_up(self, stack: AsyncExitStack) -> None:
        try:
            addresses = await self._resolve(self._names)
        except FleetError as error:
            _log.warning("%s; the servers that are known are kept", error)
            return
        await self._meet_all(addresses, stack)

    async def _meet_all(self, addresses: Sequence[str], stack: AsyncExitStack) -> None:
        known = {member.address for member in self._fleet.members}
        for address in addresses:
            if address not in known:
                await self._meet(address, stack)

    async def _meet(self, address: str, stack: AsyncExitStack) -> None:
        """Its channel stays open only if it joins."""
        async with AsyncExitStack() as trial:
            client = await trial.enter_async_context(self._open_client(address))
            info = await self._fitting(client)
            others = {member.info.server_id for member in self._fleet.members}
            if info is None or info.server_id in others:
                return
            _log.info("server %s is new; the next publication brings it up to date", address)
            self._fleet.join(Member(client, info))
            await stack.enter_async_context(trial.pop_all())

    async def _fitting(self, client: FleetClient) -> ServerInfo | None:
        """What a server says of itself, if it is ready and fits; None: not now, or never."""
        try:
            info = await client.info(INFO_DEADLINE_S)
        except FleetError:
            return None
        if info.state in (*ENDING, "starting") or info.server_id in self._refused:
            return None
        if differences := differences_of(info, self._expected):
            self._refused.add(info.server_id)
            _log.warning("server %s came and does not fit: %s", client.address, "; ".join(differences))
            if self._joins is not None:
                self._joins.refused[client.address] = f"it does not fit the run: {'; '.join(differences)}"
            return None
        return info
