"""`asyppo-fleet status --checksums`: what every server's engine was given, tensor by tensor, side by side."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.console import Group
from rich.table import Table

from asyppo_async.errors import FleetError
from asyppo_async.rpc.calls import ServedChecksums
from asyppo_async.rpc.client import FleetClient
from asyppo_async.rpc.security import ClientSecurity

Answer = ServedChecksums | FleetError | None
"""None: no publication has loaded what is served there, or it is unknown."""


async def ask(addresses: Sequence[str], security: ClientSecurity, deadline_s: float) -> dict[str, Answer]:
    """Every server's answer, or why there is none, asked at the same time."""

    async def one(address: str) -> Answer:
        async with FleetClient(address, security=security) as client:
            try:
                return await client.checksums(deadline_s)
            except FleetError as error:
                return error

    async with asyncio.TaskGroup() as tasks:
        asked = {address: tasks.create_task(one(address)) for address in addresses}
    return {address: answer.result() for address, answer in asked.items()}


def disagreements(answers: Mapping[str, Answer]) -> list[str]:
    """Tensors of which servers with the weights of one publication hold different bytes."""
    publications: dict[tuple[str, int, int], list[dict[str, int]]] = {}
    for answer in answers.values():
        if isinstance(answer, ServedChecksums):
            key = (answer.run_id, answer.incarnation, answer.version)
            publications.setdefault(key, []).append(answer.tensors)
    return sorted(
        {
            name
            for tensors in publications.values()
            for name in set().union(*tensors)
            if len({each.get(name) for each in tensors}) > 1
        }
    )


def view(answers: Mapping[str, Answer]) -> Group:
    """A column for each server, a row for each tensor; a tensor with a disagreement has a `!`."""
    table = Table(box=None, pad_edge=False)
    table.add_column("tensor", overflow="fold")
    known = {address: answer for address, answer in answers.items() if isinstance(answer, ServedChecksums)}
    for address, answer in known.items():
        table.add_column(
            f"{address}\n{answer.run_id}/{answer.incarnation} v{answer.version}", justify="right"
        )
    wrong = disagreements(answers)
    for name in dict.fromkeys(name for answer in known.values() for name in answer.tensors):
        cells = [_hexadecimal(answer.tensors.get(name)) for answer in known.values()]
        table.add_row(f"{name} !" if name in wrong else name, *cells)
    notes = [
        str(answer) if answer is not None else f"{address}: no publication has loaded what it serves"
        for address, answer in answers.items()
        if not isinstance(answer, ServedChecksums)
    ]
    return Group(*([table] if known else []), *notes)


def as_json(answers: Mapping[str, Answer]) -> str:
    """The same for programs: one object, by address; null where no publication has loaded what is served."""
    rows = {
        address: {"error": str(answer)}
        if isinstance(answer, FleetError)
        else None
        if answer is None
        else asdict(answer)
        for address, answer in answers.items()
    }
    return json.dumps(rows, indent=2)


def _hexadecimal(checksum: int | None) -> str:
    return "-" if checksum is None else f"{checksum:016x}"
