"""The virtual clock: events in time order, ties in order of scheduling."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, order=True)
class Event:
    """Something that will happen; `cancelled` events are passed over."""

    at_s: float
    sequence_number: int
    action: Callable[[], None] = field(compare=False)
    cancelled: bool = field(default=False, compare=False)


class VirtualClock:
    """Runs actions at their times."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[Event] = []
        self._num_scheduled = 0

    def at(self, at_s: float, action: Callable[[], None]) -> Event:
        """Run `action` at `at_s`, or now if that is past."""
        event = Event(at_s=max(at_s, self.now_s), sequence_number=self._num_scheduled, action=action)
        self._num_scheduled += 1
        heapq.heappush(self._events, event)
        return event

    def after(self, delay_s: float, action: Callable[[], None]) -> Event:
        """Run `action` after `delay_s`."""
        return self.at(self.now_s + delay_s, action)

    def step(self) -> bool:
        """Run the next event. False: there is none."""
        while self._events:
            event = heapq.heappop(self._events)
            if not event.cancelled:
                self.now_s = event.at_s
                event.action()
                return True
        return False
