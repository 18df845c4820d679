"""The servers of a run: waiting for them, checking that they are the right ones, and choosing one for a group."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from asyppo_async.errors import FleetUnavailable
from asyppo_async.rpc.calls import GenerateCall, ResponseParts
from asyppo_async.rpc.dispatch import Dispatcher, gone, least_loaded
from asyppo_async.rpc.info import ServerInfo
from asyppo_async.rpc.member import Member
from asyppo_async.trainer.coordinator.generated import Generated, generated_of
from asyppo_async.trainer.coordinator.membership_state import MembershipState, Sending
from asyppo_async.types import Prompt, SamplingParams
from asyppo_async.weights.store import address_towards

_log = logging.getLogger(__name__)

NOBODY_CURRENT = "no server has weights of this run that it may serve; publish before generating"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    run_id: str
    incarnation: int


class Fleet:
    """The members of a run, by the rules of `MembershipState`. Implements the rollouts' `Generator`."""

    def __init__(
        self, members: Sequence[Member], run: RunIdentity, *, debug: bool, routed_experts: bool = False
    ) -> None:
        """Args:
        members: of the run's start.
        run: whose servers they are.
        debug: the rules of membership are checked after every transition.
        routed_experts: responses say which experts were used.
        """
        self.members = tuple(members)
        self.run = run
        self._routed_experts = routed_experts
        self.num_lost = 0
        """Servers that were lost so far, each time counted."""
        self.num_rejoined = 0
        self.state = MembershipState(debug=debug)
        for member in members:
            self.state.joined(member.address)
        self._by_name = {member.address: member for member in members}
        self._steady = asyncio.Lock()
        """Held while versions are sent, so that nobody stands aside in the middle of it."""
        self._numbers = itertools.count()
        self._dispatcher = Dispatcher(self)
        self._changed = asyncio.Event()

    @property
    def current(self) -> tuple[Member, ...]:
        """The members for new training work."""
        return self.named(self.state.current)

    def named(self, names: Iterable[str]) -> tuple[Member, ...]:
        """The members of these names."""
        return tuple(self._by_name[name] for name in names)

    @asynccontextmanager
    async def sending(self, version: int) -> AsyncIterator[Sending]:
        """A version under way; what the block has not completed when it is left ends without effect.

        Raises:
            FleetUnavailable: nobody takes part.
        """
        async with self._steady:
            sending = self.state.open(version)
            if sending is None:
                raise FleetUnavailable(f"no server is there to receive version {version}; start one")
            try:
                yield sending
            finally:
                if self.state.sending == sending:
                    self.state.abandoned()
                self._notify()

    @asynccontextmanager
    async def renumbering(self, version: int) -> AsyncIterator[tuple[Member, ...]]:
        """Who has to be told a new number for weights that they have; nobody where some have older weights."""
        async with self._steady:
            names = self.state.taking_part
            if names != self.state.current:
                yield ()
                return
            yield self.named(names)
            self.state.renumbered(version)

    async def set_aside(self) -> Member | None:
        """Let the least loaded member stand aside; None where that would leave nobody to train with."""
        async with self._steady:
            if len(self.state.current) < 2:
                return None
            member = self.least_loaded()
            self.state.set_aside(member.address)
            return member

    def bring_back(self) -> None:
        """The next publication includes the one that stood aside."""
        self.state.bring_back()

    def address_of_this_host(self) -> str:
        """The address under which the servers reach this machine: that of the way to the first of them."""
        host, port = self.members[0].address.rsplit(":", 1)
        return address_towards(host.strip("[]"), int(port))

    def least_loaded(self) -> Member:
        """The current member with the fewest outstanding tokens; the first of equals.

        Raises:
            FleetUnavailable: nobody serves the newest version.
        """
        if not self.current:
            raise FleetUnavailable(NOBODY_CURRENT)
        return least_loaded(self.current)

    async def generate(
        self,
        prompt: Prompt,
        *,
        num_samples: int,
        sampling: SamplingParams,
        deadline_s: float,
        on_tokens: Callable[[int], None],
        on_server: Callable[[str], None],
        parts: ResponseParts | None = None,
    ) -> Generated:
        """The responses of one prompt that are finished by the deadline, from the least loaded current member.

        Where it fails or has no room, the rest is asked of another.

        Raises:
            FleetUnavailable: every server is lost, or the call failed too often.
            FleetError: names the server.
        """
        collected = await self._dispatcher.collect(
            self._call(prompt, num_samples, sampling),
            deadline_s,
            on_tokens=on_tokens,
            on_server=on_server,
            parts=parts,
        )
        return generated_of(collected.samples, collected.server, collected.failures)

    @property
    def num_moves(self) -> int:
        """Calls whose rest was asked of another server, or again of the same one."""
        return self._dispatcher.num_moves

    @property
    def is_anybody_left(self) -> bool:
        return any(not self.state.is_lost(member.address) for member in self.members)

    async def candidates(self, call: GenerateCall, deadline_s: float) -> Sequence[Member]:
        """The current members, once there are some. See `Servers`."""
        if not await self._someone_current(deadline_s):
            return ()
        if not self.current:
            raise FleetUnavailable(NOBODY_CURRENT)
        return self.current

    async def is_there(self, member: Member) -> bool:
        """Ask a member of which a call failed; one that is gone, ends or was started again is lost from here on."""
        words = await gone(member)
        if not words:
            return True
        if self.state.is_lost(member.address):
            return False  # somebody else has asked
        _log.warning("server %s is lost: %s", member.address, words)
        self.num_lost += 1
        self.state.lost(member.address)
        self._notify()
        return False

    async def are_there(self, names: Iterable[str]) -> bool:
        """`is_there` of all of them."""
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(self.is_there(member)) for member in self.named(names)]
        return all(answer.result() for answer in asked)

    def join(self, member: Member) -> None:
        """A server that was not there before: the next publication brings it up to date."""
        self.members = (*self.members, member)
        self._by_name[member.address] = member
        self.state.joined(member.address)
        self._notify()

    def leave_out(self, address: str) -> bool:
        """Do without a member that answers but failed; False: it is the only one, or none of this name takes part."""
        taking_part = self.state.taking_part
        if address not in taking_part or len(taking_part) < 2:
            return False
        _log.warning("server %s is left out; it may join again", address)
        self.num_lost += 1
        self.state.lost(address)
        self._notify()
        return True

    def rejoin(self, member: Member, info: ServerInfo) -> None:
        """A lost server is there again: the next publication brings it up to date."""
        member.info = info
        self.num_rejoined += 1
        self.state.joined(member.address)

    async def _someone_current(self, deadline_s: float) -> bool:
        """Waits for: a member that serves the newest version. Unblocked by: the end of a publication, a loss.

        False: nobody did within the deadline.
        """
        try:
            async with asyncio.timeout(deadline_s):
                while self.state.num_sendings and not self.current and self.is_anybody_left:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def generate_on(
        self,
        member: Member,
        prompt: Prompt,
        *,
        num_samples: int,
        sampling: SamplingParams,
        deadline_s: float,
        on_tokens: Callable[[int], None],
    ) -> Generated:
        """`generate` on this member alone, whatever version it serves."""
        call = self._call(prompt, num_samples, sampling)
        collected = await self._dispatcher.collect_on(member, call, deadline_s, on_tokens=on_tokens)
        return generated_of(collected.samples, collected.server, collected.failures)

    def _call(self, prompt: Prompt, num_samples: int, sampling: SamplingParams) -> GenerateCall:
        return GenerateCall(
            run_id=self.run.run_id,
            incarnation=self.run.incarnation,
            request_id=f"{self.run.run_id}-{self.run.incarnation}-{next(self._numbers)}",
            prompt_id=prompt.id,
            prompt_token_ids=prompt.token_ids,
            num_samples=num_samples,
            sampling=sampling,
            return_routed_experts=self._routed_experts,
        )
