"""Many servers as one: `async with FleetPool(["node1:50051", "dns:///fleet:50051"]) as pool`.

For programs that only generate. A trainer, which also decides whose weights are new enough, has its own list of servers
over the same dispatcher.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any, Self

from asyppo_async.concurrency import beside
from asyppo_async.errors import FleetError, FleetUnavailable
from asyppo_async.rpc.calls import GenerateCall
from asyppo_async.rpc.client import FleetClient
from asyppo_async.rpc.dispatch import Dispatcher, gone, least_loaded, whole
from asyppo_async.rpc.info import ServerInfo
from asyppo_async.rpc.member import Member
from asyppo_async.rpc.names import LOOK_EVERY_S, Resolve, addresses_of, check_targets, is_name
from asyppo_async.rpc.pulse import SILENCE_S
from asyppo_async.rpc.security import OPEN, ClientSecurity
from asyppo_async.types import Int32Array, Response, SamplingParams

_log = logging.getLogger(__name__)
_TAKES_WORK = ("serving", "updating")


@dataclass(slots=True)
class _Follower:
    """Of one address."""

    address: str
    is_wanted: bool = True
    """Its name has it; else it is followed until what runs there has ended."""
    member: Member | None = None
    task: "asyncio.Task[None] | None" = None


class FleetPool:
    """Knows the servers, follows names as they change, and spreads calls. One event loop owns it."""

    def __init__(
        self,
        targets: Sequence[str],
        *,
        security: ClientSecurity = OPEN,
        silence_s: float = SILENCE_S,
        look_every_s: float = LOOK_EVERY_S,
        resolve: Resolve = addresses_of,
    ) -> None:
        """Args:
        targets: `host:port`, or `dns:///name:port` for all addresses of a name.
        security: TLS and token.
        silence_s: A server that says nothing for so long while calls wait for it is given up.
        look_every_s: How often names are resolved again, servers that are not there looked for, and states told.
        resolve: From targets to addresses.

        Raises:
            ConfigError: no target, or a name without a port.
        """
        check_targets(targets)
        self._targets = tuple(targets)
        self._security = security
        self._silence_s = silence_s
        self._look_every_s = look_every_s
        self._resolve = resolve
        self._members: dict[str, Member] = {}
        self._followers: dict[str, _Follower] = {}
        self._errors: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._dispatcher = Dispatcher(self)
        self._numbers = itertools.count()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(beside(self._run()))
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._stack.__aexit__(*error)

    @property
    def members(self) -> tuple[Member, ...]:
        """The servers that are there and take work."""
        return tuple(self._members.values())

    @property
    def num_moves(self) -> int:
        """Calls whose rest was asked of another server, or again of the same one."""
        return self._dispatcher.num_moves

    async def generate(
        self,
        prompt_token_ids: Sequence[int] | Int32Array,
        *,
        num_samples: int,
        sampling: SamplingParams,
        deadline_s: float,
        prompt_id: str = "",
        on_tokens: Callable[[int], None] = lambda _: None,
    ) -> tuple[Response, ...]:
        """Whole responses of one prompt, with the weights that the least loaded server serves.

        Calls with the same `prompt_id` go to the same server while they overlap: it has the prompt's KV.

        Raises:
            FleetUnavailable: not all of them were finished by the deadline, or the call failed on many servers.
            RequestRejected: the request is wrong, so no server takes it.
        """
        number = next(self._numbers)
        call = GenerateCall(
            run_id="",
            incarnation=0,
            request_id=f"pool-{number}",
            prompt_id=prompt_id,
            prompt_token_ids=prompt_token_ids,
            num_samples=num_samples,
            sampling=sampling,
        )
        ends_at_s = time.monotonic() + deadline_s
        info = await self._somebody(deadline_s)
        left_s = ends_at_s - time.monotonic()
        # One request has tokens of one run only: a server of another one is no help when this one fails.
        call = replace(call, run_id=info.run_id, incarnation=info.incarnation)
        return whole(await self._dispatcher.collect(call, left_s, on_tokens=on_tokens), call, deadline_s)

    async def vocab_size(self, deadline_s: float) -> int:
        """Of the model that the servers have: token ids are below it.

        Raises:
            FleetUnavailable: nobody takes work within the deadline.
        """
        return (await self._somebody(deadline_s)).vocab_size

    async def _somebody(self, deadline_s: float) -> ServerInfo:
        try:
            async with asyncio.timeout(deadline_s):
                return least_loaded(await self._anybody()).info
        except TimeoutError:
            raise FleetUnavailable(self._nobody(deadline_s)) from None

    @property
    def is_anybody_left(self) -> bool:
        """A server that is gone may come back, as long as the deadline allows."""
        return True

    async def candidates(self, call: GenerateCall, deadline_s: float) -> Sequence[Member]:
        """The servers that take work of the call's run. See `Servers`."""
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    fitting = [
                        member
                        for member in await self._anybody()
                        if (member.info.run_id, member.info.incarnation) == (call.run_id, call.incarnation)
                    ]
                    if fitting:
                        return fitting
                    await self._changed.wait()
        except TimeoutError:
            return ()

    async def is_there(self, member: Member) -> bool:
        """See `Servers`."""
        words = await gone(member)
        if words:
            self._leave(member.address, words)
        return not words

    async def _anybody(self) -> tuple[Member, ...]:
        while not self._members:
            await self._changed.wait()
        return self.members

    def _nobody(self, deadline_s: float) -> str:
        reasons = "; ".join(self._errors.values()) or "no answer yet"
        return f"no server of {', '.join(self._targets)} takes work within {deadline_s:g} s ({reasons})"

    def _leave(self, address: str, words: str) -> None:
        self._errors[address] = words
        if self._members.pop(address, None) is not None:
            _log.warning("server %s leaves the pool: %s", address, words)

    async def _run(self) -> None:
        """Consumes: addresses. Produces: one follower each. Waits for: time. Never returns."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    self._update(await self._resolve(self._targets), tasks)
                    self._errors.pop("", None)
                except FleetError as error:
                    _log.warning("%s; the servers that are known are kept", error)
                    self._errors[""] = str(error)
                if not any(map(is_name, self._targets)):
                    return
                await asyncio.sleep(self._look_every_s)

    def _update(self, addresses: Sequence[str], tasks: asyncio.TaskGroup) -> None:
        """Follow new addresses, and give no new calls to those that are no more."""
        for address in addresses:
            if address not in self._followers:
                follower = self._followers[address] = _Follower(address)
                follower.task = tasks.create_task(self._follow(follower))
        for follower in list(self._followers.values()):
            follower.is_wanted = follower.address in addresses
            if follower.is_wanted:
                continue
            self._leave(follower.address, f"{follower.address}: its name has it no more")
            if follower.task is not None and not (follower.member and follower.member.outstanding_tokens):
                follower.task.cancel()
                del self._followers[follower.address]
                self._errors.pop(follower.address, None)

    async def _follow(self, follower: _Follower) -> None:
        """Consumes: what a server says of itself. Produces: its place in the pool. Ends when it is cancelled."""
        async with FleetClient(
            follower.address, security=self._security, silence_s=self._silence_s
        ) as client:
            while True:
                try:
                    async with aclosing(client.watch(self._look_every_s)) as infos:
                        async for info in infos:
                            follower.member = follower.member or Member(client, info)
                            follower.member.info = info
                            self._place(follower, follower.member)
                except FleetError as error:
                    self._leave(follower.address, str(error))
                await asyncio.sleep(self._look_every_s)

    def _place(self, follower: _Follower, member: Member) -> None:
        if member.info.state not in _TAKES_WORK:
            self._leave(member.address, f"server {member.address} is {member.info.state}")
        elif follower.is_wanted and member.address not in self._members:
            self._errors.pop(member.address, None)
            self._members[member.address] = member
        self._changed.set()
        self._changed = asyncio.Event()
