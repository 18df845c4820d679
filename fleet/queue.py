"""The server's own queue before the engine.

The engine gets at most as many samples as it can run at once, less the slots that are kept for the probe, so nothing
waits inside the engine and a sample starts under the weights that are loaded when it is handed over. First come, first
served; the samples of one request are neighbours.
"""

import asyncio
import heapq
import itertools
from enum import Enum, auto

from asyppo_async.fleet.call_error import CallError


class _Place(Enum):
    WAITING = auto()
    GRANTED = auto()
    """It has a slot, and its owner has not run since."""
    RUNNING = auto()
    GONE = auto()


class Ticket:
    """One sample's place in the queue, and later its slot in the engine."""

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.place = _Place.WAITING
        self.granted = asyncio.Event()

    def __lt__(self, other: "Ticket") -> bool:
        return self.sequence < other.sequence


class AdmissionQueue:
    """Single-threaded: all methods belong to one event loop."""

    def __init__(self, *, num_slots: int, max_queued: int) -> None:
        self._num_slots = num_slots
        self._max_queued = max_queued
        self._sequence = itertools.count()
        self._waiting: list[Ticket] = []
        self._num_waiting = 0
        self._occupied: set[Ticket] = set()
        self._held = False

    @property
    def num_running(self) -> int:
        return len(self._occupied)

    @property
    def num_queued(self) -> int:
        return self._num_waiting

    def join(self, num_samples: int) -> list[Ticket]:
        """Places for the samples of one request, all or none.

        Raises:
            CallError: INVALID_ARGUMENT if they can never fit, RESOURCE_EXHAUSTED if they do not fit now.
        """
        room = self._num_slots + self._max_queued
        if num_samples > room:
            raise CallError(
                "INVALID_ARGUMENT",
                f"{num_samples} samples were asked for at once and this server takes at most {room}; ask for fewer",
            )
        taken = len(self._occupied) + self._num_waiting
        if taken + num_samples > room:
            raise CallError(
                "RESOURCE_EXHAUSTED",
                f"{num_samples} samples do not fit: {taken} of {room} places are taken; try again later",
            )
        tickets = [Ticket(next(self._sequence)) for _ in range(num_samples)]
        for ticket in tickets:
            self._wait_again(ticket)
        self._hand_over()
        return tickets

    async def acquire(self, ticket: Ticket) -> None:
        """Wait for a slot. Waits for: a slot that is left, and the end of a hold. Unblocked by: `leave`, `resume`."""
        while ticket.place is not _Place.GRANTED:
            if ticket.place is not _Place.WAITING:
                raise AssertionError(f"a ticket that is {ticket.place.name} asks for a slot")
            await ticket.granted.wait()
        ticket.place = _Place.RUNNING

    def rejoin(self, ticket: Ticket) -> None:
        """Give the slot back and wait again, ahead of all that came later."""
        self._occupied.remove(ticket)
        self._wait_again(ticket)
        self._hand_over()

    def leave(self, ticket: Ticket) -> None:
        """Give up the place or the slot; a second time is nothing."""
        if ticket.place is _Place.WAITING:
            self._num_waiting -= 1
        self._occupied.discard(ticket)
        ticket.place = _Place.GONE
        self._hand_over()

    def hold(self) -> None:
        """Hand nothing over until `resume`; what was granted and has not begun waits again."""
        self._held = True
        for ticket in [each for each in self._occupied if each.place is _Place.GRANTED]:
            self._occupied.remove(ticket)
            self._wait_again(ticket)

    def resume(self) -> None:
        self._held = False
        self._hand_over()

    def _wait_again(self, ticket: Ticket) -> None:
        ticket.place = _Place.WAITING
        ticket.granted.clear()
        heapq.heappush(self._waiting, ticket)
        self._num_waiting += 1

    def _hand_over(self) -> None:
        while not self._held and self._waiting and len(self._occupied) < self._num_slots:
            ticket = heapq.heappop(self._waiting)
            if ticket.place is not _Place.WAITING:
                continue
            self._num_waiting -= 1
            self._occupied.add(ticket)
            ticket.place = _Place.GRANTED
            ticket.granted.set()
