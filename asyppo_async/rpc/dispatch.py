"""One request over several servers: which one is asked, and where its rest goes when a server fails or has no room.

The only layer of retries between a user of a fleet and its servers. A caller's mistake is never tried again.
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from asyppo_async.errors import ContractBroken, FleetError, FleetOverloaded, FleetUnavailable
from asyppo_async.rpc.calls import GenerateCall, ResponseParts, all_of
from asyppo_async.rpc.codec import SampleFailure
from asyppo_async.rpc.member import ENDING, INFO_DEADLINE_S, Member
from asyppo_async.types import Response

MAX_MOVES = 8
"""A request that fails so often has a fault of its own."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0

_log = logging.getLogger(__name__)


class Servers(Protocol):
    """Who knows the servers."""

    @property
    def is_anybody_left(self) -> bool:
        """Whether a server may still be there."""
        ...

    async def candidates(self, call: GenerateCall, deadline_s: float) -> Sequence[Member]:
        """Whom this call may be given to; waits for somebody. Empty: nobody within the deadline.

        Raises:
            FleetUnavailable: nobody will be.
        """
        ...

    async def is_there(self, member: Member) -> bool:
        """Ask a member of which a call failed; one that is not there is no candidate any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What is there of a request at its end or its deadline."""

    samples: tuple[Response | None, ...]
    """None: failed, or not finished by the deadline."""
    server: str
    """The last one that was asked; empty: none was at the deadline."""
    failures: Mapping[int, SampleFailure]
    """Of the samples that ended without being finished, by index."""


class Dispatcher:
    """Gives requests to the servers that `servers` knows."""

    def __init__(self, servers: Servers) -> None:
        self.num_moves = 0
        """Calls whose rest was asked of another server, or again of the same one."""
        self._servers = servers

    async def collect(
        self,
        call: GenerateCall,
        deadline_s: float,
        *,
        on_tokens: Callable[[int], None] = lambda _: None,
        on_server: Callable[[str], None] = lambda _: None,
        parts: ResponseParts | None = None,
    ) -> Collected:
        """What is finished by the deadline. Where a server fails, the rest is asked of another, with what arrived.

        Args:
            call: What is asked for.
            deadline_s: For all of it.
            on_tokens: Called with the tokens of all samples so far, whenever some arrive.
            on_server: Called with the address of each server that is asked.
            parts: What there is of it already; what arrives is found in it.

        Raises:
            FleetUnavailable: every server is lost, or the call failed `MAX_MOVES` times.
            FleetError: no other server would help; names the one that said so.
        """
        parts = parts or ResponseParts(call.num_samples, call.sampling, call.begun)
        if not parts.unfinished():
            return _complete(parts, call)
        ends_at_s = time.monotonic() + deadline_s
        avoided: set[str] = set()
        num_failures = num_refusals = 0
        while (left_s := ends_at_s - time.monotonic()) > 0:
            candidates = await self._servers.candidates(call, left_s)
            if not candidates:
                break
            member = choose(candidates, call, avoided)
            on_server(member.address)
            try:
                left_s = ends_at_s - time.monotonic()
                return await self.collect_on(member, call, left_s, on_tokens=on_tokens, parts=parts)
            except FleetOverloaded as error:
                num_refusals += 1
                pause_s = error.retry_after_s or back_off_s(num_refusals)
            except FleetUnavailable as error:
                num_failures += 1
                if not await self._servers.is_there(member) and not self._servers.is_anybody_left:
                    raise
                if num_failures > MAX_MOVES:
                    raise
                _log.warning("%s; %d tokens of it go on elsewhere", error, parts.num_tokens)
                self.num_moves += 1
                pause_s = back_off_s(num_failures)
            avoided.add(member.address)
            if avoided.issuperset(each.address for each in candidates):
                avoided.clear()
                await asyncio.sleep(max(0.0, min(pause_s, ends_at_s - time.monotonic())))
        return Collected(samples=parts.responses(), server="", failures=parts.failures)

    async def collect_on(
        self,
        member: Member,
        call: GenerateCall,
        deadline_s: float,
        *,
        on_tokens: Callable[[int], None] = lambda _: None,
        parts: ResponseParts | None = None,
    ) -> Collected:
        """What this member has finished of a call by the deadline; `parts` is what there is of it already."""
        parts = parts or ResponseParts(call.num_samples, call.sampling, call.begun)
        asked_for = parts.num_samples * call.sampling.max_tokens - parts.num_tokens
        arrived = before = parts.num_tokens

        def count(num_tokens: int) -> None:
            nonlocal arrived
            member.outstanding_tokens -= num_tokens - arrived
            arrived = num_tokens
            on_tokens(num_tokens)

        member.outstanding_tokens += asked_for
        member.prompts[call.prompt_id] += 1
        try:
            samples = await member.client.collect_until(call, deadline_s, count, parts)
        finally:
            member.outstanding_tokens -= asked_for - (arrived - before)
            member.prompts -= Counter((call.prompt_id,))  # forgets what falls to 0
        return Collected(samples=samples, server=member.address, failures=parts.failures)


def _complete(parts: ResponseParts, call: GenerateCall) -> Collected:
    """There is nothing to ask for."""
    try:
        return Collected(samples=parts.responses(), server="", failures=parts.failures)
    except ValueError as error:
        raise ContractBroken(f"Generate {call.request_id}: {error}") from error


def least_loaded(members: Iterable[Member]) -> Member:
    """The member with the fewest outstanding tokens; the first of equals."""
    return min(members, key=lambda member: member.outstanding_tokens)


def choose(candidates: Sequence[Member], call: GenerateCall, avoided: Iterable[str] = ()) -> Member:
    """The least loaded candidate, or one that works on the same prompt if it is ahead by no more than this call.

    Args:
        candidates: At least one.
        call: What is to be asked; its prompt id names what has a prefix in common.
        avoided: Addresses that come last.
    """
    open_ = [member for member in candidates if member.address not in set(avoided)] or list(candidates)
    least = least_loaded(open_)
    at_work = [member for member in open_ if call.prompt_id and member.prompts[call.prompt_id]]
    if not at_work:
        return least
    nearest = least_loaded(at_work)
    slack = call.num_samples * call.sampling.max_tokens
    return nearest if nearest.outstanding_tokens <= least.outstanding_tokens + slack else least


def back_off_s(num_times: int) -> float:
    """A pause that doubles, and that not everybody makes alike."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (num_times - 1)) * random.uniform(0.5, 1.0)


def whole(collected: Collected, call: GenerateCall, deadline_s: float) -> tuple[Response, ...]:
    """All samples of a request; see `all_of` for what is raised where one is missing."""
    who = f"server {collected.server}" if collected.server else "no server"
    return all_of(collected.samples, collected.failures, who, call, deadline_s)


async def gone(member: Member) -> str:
    """Why a member is not there, or is another process than before; empty: it is there and takes work."""
    try:
        info = await member.client.info(min(INFO_DEADLINE_S, member.client.silence_s))
    except FleetError as error:
        return str(error)
    if info.server_id != member.info.server_id:
        return "it was started again"
    return f"it is {info.state}" if info.state in ENDING else ""
