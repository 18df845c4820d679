"""Several parties at one phase: all of them, or the error that explains it best."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TypeVar

from asyppo_async.errors import AsyppoError, FleetError, WorkerError

EXPLAIN_S = 2.0
"""How long the others may still say why, after the first of them failed."""

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")


async def all_parties(parts: Sequence[Coroutine[object, object, T]]) -> list[T]:
    """The results of all parts, in their order.

    Where one end of a collective dies, the other ends fail too, often sooner. So after the first failure the others
    have `EXPLAIN_S` to fail as well, then they are cancelled, and what a server says goes before what its peers
    noticed; of two servers the first one.

    Raises:
        AsyppoError: the failure itself, never a group of them.
    """
    failures: list[AsyppoError] = []
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(_outcome(part, failures)) for part in parts]
        pending = set(running)
        failed = False
        while pending and not failed:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            failed = bool(failures)
        if pending:
            _, pending = await asyncio.wait(pending, timeout=EXPLAIN_S)
            for task in pending:
                task.cancel()
    outcomes = [task.result() for task in running if not task.cancelled()]
    if failures:
        raise min(failures, key=_distance)
    return [outcome for outcome in outcomes if not isinstance(outcome, AsyppoError)]


async def party_and_others(
    one: Coroutine[object, object, A], others: Sequence[Coroutine[object, object, B]]
) -> tuple[A, list[B]]:
    """`all_parties` for one part of another kind than the rest."""
    first: list[A] = []
    rest: dict[int, B] = {}

    async def keep_first() -> None:
        first.append(await one)

    async def keep(index: int, other: Coroutine[object, object, B]) -> None:
        rest[index] = await other

    await all_parties([keep_first(), *(keep(index, other) for index, other in enumerate(others))])
    return first[0], [rest[index] for index in range(len(others))]


def _distance(failure: AsyppoError) -> int:
    """How far from the cause: a server's own words, what a transfer noticed, what a worker group reports."""
    if failure.server is not None:
        return 0
    return 1 if isinstance(failure, FleetError) else 3 if isinstance(failure, WorkerError) else 2


async def _outcome(part: Coroutine[object, object, T], failures: list[AsyppoError]) -> T | AsyppoError:
    """A failure as a value, so that the task group does not cancel the others at once; noted in its turn."""
    try:
        return await part
    except AsyppoError as error:
        failures.append(error)
        return error
