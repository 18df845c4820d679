"""The servers of a run: waiting for them, checking that they are the right ones, and choosing one for a group."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from asyppo_async.errors import ConfigError, FleetMismatch, FleetUnavailable
from asyppo_async.fingerprint import ModelIdentity
from asyppo_async.rpc.calls import GenerateCall
from asyppo_async.rpc.client import FleetClient
from asyppo_async.rpc.codec import ServerInfo
from asyppo_async.trainer.coordinator.rollouts import Generated
from asyppo_async.trainer.coordinator.together import together
from asyppo_async.types import Prompt, SamplingParams
from asyppo_async.weights.group import address_towards

_log = logging.getLogger(__name__)

INFO_DEADLINE_S = 5.0
"""A server answers `GetInfo` within a second in every state."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    run_id: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What every server must have in common with the trainer."""

    identity: ModelIdentity
    """Of the trainer's own model folder."""
    dtype: str
    """Type of the weights that are published."""
    longest_tokens: int
    """Longest prompt plus longest response that will be asked for."""


class Member:
    """One server of the run."""

    def __init__(self, client: FleetClient, info: ServerInfo) -> None:
        self.client = client
        self.info = info
        self.outstanding_tokens = 0
        """Tokens that were asked for and have not come."""

    @property
    def address(self) -> str:
        return self.client.address


class Fleet:
    """The members of a run. Implements the rollouts' `Generator`."""

    def __init__(self, members: Sequence[Member], run: RunIdentity) -> None:
        self.members = tuple(members)
        self.run = run
        self._numbers = itertools.count()

    def address_of_this_host(self) -> str:
        """The address under which the servers reach this machine: that of the way to the first of them."""
        host, port = self.members[0].address.rsplit(":", 1)
        return address_towards(host.strip("[]"), int(port))

    def least_loaded(self) -> Member:
        """The server with the fewest outstanding tokens; the first of equals."""
        return min(self.members, key=lambda member: member.outstanding_tokens)

    async def generate(
        self,
        prompt: Prompt,
        *,
        num_samples: int,
        sampling: SamplingParams,
        deadline_s: float,
        on_tokens: Callable[[int], None],
    ) -> Generated:
        """All responses of one prompt, from one server.

        Raises:
            FleetError: names the server; `FleetOverloaded` where another try later may help.
        """
        member = self.least_loaded()
        call = GenerateCall(
            run_id=self.run.run_id,
            incarnation=self.run.incarnation,
            request_id=f"{self.run.run_id}-{self.run.incarnation}-{next(self._numbers)}",
            prompt_id=prompt.id,
            prompt_token_ids=prompt.token_ids,
            num_samples=num_samples,
            sampling=sampling,
        )
        asked_for = num_samples * sampling.max_tokens
        arrived = 0

        def count(num_tokens: int) -> None:
            nonlocal arrived
            member.outstanding_tokens -= num_tokens - arrived
            arrived = num_tokens
            on_tokens(num_tokens)

        member.outstanding_tokens += asked_for
        try:
            responses = await member.client.collect(call, deadline_s, count)
        finally:
            member.outstanding_tokens -= asked_for - arrived
        return Generated(responses=responses, server=member.address)


@asynccontextmanager
async def connect(
    addresses: Sequence[str], expected: Expected, run: RunIdentity, join_timeout_s: float
) -> AsyncIterator[Fleet]:
    """Wait for every server, check each, and hold the channels until the block is left.

    Raises:
        FleetUnavailable: a server is not there, or not ready, within `join_timeout_s`.
        FleetMismatch: a server has another model, tokenizer, vocabulary, type or length; names both sides.
        ConfigError: no address, or one that comes twice.
    """
    repeated = sorted({address for address in addresses if addresses.count(address) > 1})
    if repeated or not addresses:
        raise ConfigError(
            f"fleet.servers: {f'{repeated[0]} comes twice' if repeated else 'no server is named'}"
        )
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(FleetClient(address)) for address in addresses]
        members = await together([_join(client, expected, join_timeout_s) for client in clients])
        by_server: dict[str, Member] = {}
        for member in members:
            other = by_server.setdefault(member.info.server_id, member)
            if other is not member:
                raise FleetMismatch(f"{other.address} and {member.address} are the same server; name it once")
        _log.info("fleet of %d: %s", len(members), ", ".join(member.address for member in members))
        yield Fleet(members, run)


async def _join(client: FleetClient, expected: Expected, join_timeout_s: float) -> Member:
    info = await _wait_until_ready(client, join_timeout_s)
    differences = differences_of(info, expected)
    if differences:
        raise FleetMismatch(
            f"server {client.address} (--model {info.model_name}) does not fit this trainer: "
            f"{'; '.join(differences)}"
        )
    return Member(client, info)


async def _wait_until_ready(client: FleetClient, join_timeout_s: float) -> ServerInfo:
    deadline_at_s = time.monotonic() + join_timeout_s
    pause_s = _FIRST_PAUSE_S
    while True:
        left_s = deadline_at_s - time.monotonic()
        try:
            info = await client.info(max(min(left_s, INFO_DEADLINE_S), _FIRST_PAUSE_S))
        except FleetUnavailable as error:
            last = str(error)
        else:
            if info.state == "failed":
                raise FleetUnavailable(f"server {client.address} has failed; its own log says why")
            if info.state not in ("starting", "draining"):
                return info
            last = f"it is {info.state}"
        if deadline_at_s - time.monotonic() < pause_s:
            raise FleetUnavailable(
                f"fleet server {client.address} was not ready within {join_timeout_s:g} s ({last}); start it with "
                f"`asyppo-fleet serve`, or correct --fleet"
            )
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def differences_of(info: ServerInfo, expected: Expected) -> list[str]:
    """One clause for each way in which a server does not fit; each names both sides."""
    identity = expected.identity
    pairs: list[tuple[str, object, object]] = [
        ("model architecture", info.model_fingerprint, identity.model_fingerprint),
        ("tokenizer", info.tokenizer_fingerprint, identity.tokenizer_fingerprint),
        ("vocabulary size", info.vocab_size, identity.vocab_size),
        ("end-of-text ids", sorted(info.eos_token_ids), sorted(identity.eos_token_ids)),
        ("type of the weights", info.dtype, expected.dtype),
    ]
    lines = [f"{what} is {theirs} there, {ours} here" for what, theirs, ours in pairs if theirs != ours]
    if info.max_model_len < expected.longest_tokens:
        lines.append(
            f"it takes {info.max_model_len} tokens of prompt and response, the run needs {expected.longest_tokens}"
        )
    if info.max_model_len > identity.max_positions:
        lines.append(
            f"it takes {info.max_model_len} tokens, the trainer's model is made for {identity.max_positions}"
        )
    return lines
