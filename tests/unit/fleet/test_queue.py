"""The queue before the engine: order, bounds, holds and recalls."""

import asyncio

import pytest

from asyppo_async.fleet.call_error import CallError
from asyppo_async.fleet.queue import AdmissionQueue, Ticket


async def acquired(queue: AdmissionQueue, tickets: list[Ticket]) -> list[Ticket]:
    """Those that get a slot now."""
    got = []
    for ticket in tickets:
        try:
            async with asyncio.timeout(0.01):
                await queue.acquire(ticket)
        except TimeoutError:
            continue
        got.append(ticket)
    return got


async def test_slots_when_taken_then_the_rest_waits_in_order() -> None:
    queue = AdmissionQueue(num_slots=2, max_queued=10)
    first, second = queue.join(3), queue.join(1)
    assert await acquired(queue, first + second) == first[:2]
    assert (queue.num_running, queue.num_queued) == (2, 2)
    queue.leave(first[0])
    assert await acquired(queue, [*second, first[2]]) == [first[2]]
    queue.leave(first[1])
    assert await acquired(queue, second) == second


async def test_join_when_full_then_refused_whole() -> None:
    queue = AdmissionQueue(num_slots=2, max_queued=3)
    queue.join(4)
    with pytest.raises(CallError, match="2 samples do not fit: 4 of 5") as caught:
        queue.join(2)
    assert caught.value.status == "RESOURCE_EXHAUSTED"
    assert queue.num_queued == 2
    queue.join(1)
    with pytest.raises(CallError) as never:
        queue.join(6)
    assert never.value.status == "INVALID_ARGUMENT"


async def test_hold_when_granted_but_not_begun_then_waits_for_the_next_weights() -> None:
    queue = AdmissionQueue(num_slots=2, max_queued=10)
    begun, granted = queue.join(1), queue.join(1)
    assert await acquired(queue, begun) == begun
    queue.hold()
    assert await acquired(queue, granted) == []
    assert (queue.num_running, queue.num_queued) == (1, 1)
    queue.resume()
    assert await acquired(queue, granted) == granted


async def test_rejoin_when_others_came_later_then_ahead_of_them() -> None:
    queue = AdmissionQueue(num_slots=1, max_queued=10)
    early, late = queue.join(1), queue.join(1)
    await queue.acquire(early[0])
    queue.hold()
    queue.rejoin(early[0])
    queue.resume()
    assert await acquired(queue, late + early) == early


async def test_leave_when_waiting_or_twice_then_counts_stay_right() -> None:
    queue = AdmissionQueue(num_slots=1, max_queued=10)
    tickets = queue.join(3)
    queue.leave(tickets[1])
    queue.leave(tickets[1])
    assert (queue.num_running, queue.num_queued) == (1, 1)
    queue.leave(tickets[0])
    queue.leave(tickets[0])
    assert await acquired(queue, [tickets[2]]) == [tickets[2]]
    queue.leave(tickets[2])
    assert (queue.num_running, queue.num_queued) == (0, 0)
