"""What an operator does to running servers: look at them once, watch them, drain them."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from asyppo_async.errors import AsyppoError, FleetError, FleetUnavailable
from asyppo_async.rpc.client import FleetClient
from asyppo_async.rpc.info import ServerInfo
from asyppo_async.rpc.security import ClientSecurity

Answer = ServerInfo | FleetError
_RECONNECT_S = 1.0
_POLL_S = 0.2


async def status(addresses: Sequence[str], security: ClientSecurity, deadline_s: float) -> dict[str, Answer]:
    """Every server's answer, or why there is none, asked at the same time."""

    async def ask(address: str) -> Answer:
        async with FleetClient(address, security=security) as client:
            try:
                return await client.info(deadline_s)
            except FleetError as error:
                return error

    async with asyncio.TaskGroup() as tasks:
        asked = {address: tasks.create_task(ask(address)) for address in addresses}
    return {address: answer.result() for address, answer in asked.items()}


async def watch(
    addresses: Sequence[str], security: ClientSecurity, interval_s: float, console: Console
) -> None:
    """Show the servers until interrupted. Each has its own stream; one that is lost is looked for again."""
    answers: dict[str, Answer] = {
        address: FleetUnavailable(f"server {address}: no answer yet") for address in addresses
    }
    with Live(status_view(answers), console=console, refresh_per_second=4) as live:

        async def follow(address: str) -> None:
            while True:
                async with FleetClient(address, security=security) as client:
                    try:
                        async with aclosing(client.watch(interval_s)) as infos:
                            async for info in infos:
                                answers[address] = info
                                live.update(status_view(answers))
                    except FleetError as error:
                        answers[address] = error
                        live.update(status_view(answers))
                await asyncio.sleep(_RECONNECT_S)

        async with asyncio.TaskGroup() as tasks:
            for address in addresses:
                tasks.create_task(follow(address))


async def drain(
    addresses: Sequence[str],
    security: ClientSecurity,
    *,
    grace_s: float | None,
    deadline_s: float,
    console: Console,
) -> list[FleetError]:
    """Drain servers at the same time and wait until each is gone.

    Args:
        addresses: of the servers.
        security: with a token that has the role admin, where they ask for one.
        grace_s: for calls that run; None: each server's own.
        deadline_s: for the servers to be gone.
        console: gets a line for each server and phase.

    Returns:
        What went wrong: a server that did not answer, or that is still there at the deadline.
    """

    async def one(address: str) -> FleetError | None:
        async with FleetClient(address, security=security) as client:
            try:
                num_samples = await client.drain(grace_s, deadline_s)
            except FleetError as error:
                return error
            console.print(f"{address}: draining, {num_samples} samples under way")
            if not await _is_gone(client, deadline_s):
                return FleetUnavailable(f"server {address}: still there after {deadline_s:g} s")
        console.print(f"{address}: gone")
        return None

    async with asyncio.TaskGroup() as tasks:
        draining = [tasks.create_task(one(address)) for address in addresses]
    return [error for task in draining if (error := task.result()) is not None]


async def _is_gone(client: FleetClient, deadline_s: float) -> bool:
    ends_at_s = time.monotonic() + deadline_s
    while time.monotonic() < ends_at_s:
        try:
            await client.info(max(_POLL_S, ends_at_s - time.monotonic()))
        except FleetUnavailable:
            return True
        except AsyppoError:
            pass  # it answers, so it is there
        await asyncio.sleep(_POLL_S)
    return False


def status_view(answers: Mapping[str, Answer]) -> Group:
    """One row for each server, and below them why there is no answer; the table fits 80 columns."""
    errors = [str(answer) for answer in answers.values() if isinstance(answer, FleetError)]
    return Group(_table(answers), *errors)


def _table(answers: Mapping[str, Answer]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("server", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name in ("v", "busy", "queue", "kv", "tok/s", "peers", "up"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("run", overflow="fold")
    for address, answer in answers.items():
        if isinstance(answer, FleetError):
            table.add_row(address, "no answer")
            continue
        table.add_row(
            address,
            answer.state.replace("_", " "),
            str(answer.served_version) if answer.served_version >= 0 else "none",
            f"{answer.num_running_samples}/{answer.max_num_seqs}",
            str(answer.num_queued_samples),
            f"{answer.kv_cache_usage:.0%}" if answer.kv_cache_usage >= 0 else "-",
            f"{answer.sent_tokens_per_s:.0f}",
            str(answer.session_world_size) if answer.session_world_size else "-",
            _duration(answer.uptime_s),
            f"{answer.run_id}/{answer.incarnation}" if answer.run_id else "-",
        )
    return table


def status_json(answers: Mapping[str, Answer]) -> str:
    """The same for programs: one object, by address; `error` where there is no answer."""
    rows = {
        address: {"error": str(answer)} if isinstance(answer, FleetError) else asdict(answer)
        for address, answer in answers.items()
    }
    return json.dumps(rows, indent=2)


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{hours:.1f} h" if hours >= 1 else f"{minutes:.0f} min" if minutes >= 1 else f"{seconds:.0f} s"
