"""The simulated fleet: dispatch to the least loaded server, publications, joiners and server faults."""

from collections.abc import Callable
from functools import partial

from asyppo_async.trainer.coordinator.simulate.clock import Event, VirtualClock
from asyppo_async.trainer.coordinator.simulate.scenario import Fault, Scenario
from asyppo_async.trainer.coordinator.simulate.server import Sequence, SimServer

_SLOWNESS = 10.0


Session = list[tuple[SimServer, int]]
"""Servers of a publication, with the number of times that each had been started."""


class SimFleet:
    """Servers as the coordinator sees them: sequences in, ended sequences out, a publication at a time."""

    def __init__(
        self,
        scenario: Scenario,
        clock: VirtualClock,
        *,
        on_ended: Callable[[Sequence], None],
        on_joiner: Callable[[], None],
    ) -> None:
        """`on_joiner`: a server is there that serves nothing yet."""
        self._scenario = scenario
        self._clock = clock
        self._on_ended = on_ended
        self._on_joiner = on_joiner
        self.servers = [SimServer(plan) for plan in scenario.servers]
        self._wakes: dict[SimServer, Event] = {}
        self._homeless: list[Sequence] = []
        """Sequences while no server serves."""
        self._homes: dict[Sequence, SimServer] = {}
        self._publishing: Event | None = None
        self.num_publications = 0
        for server in self.servers:
            if server.plan.joins_s > 0:
                server.is_alive = False
                clock.at(server.plan.joins_s, partial(self._join, server))
        for fault in scenario.faults:
            if fault.kind != "kill_coordinator":
                clock.at(fault.at_s, partial(self._strike, fault))

    def submit(self, sequence: Sequence) -> None:
        """To the least loaded server that serves; kept if there is none."""
        serving = [server for server in self.servers if server.serves]
        if not serving:
            self._homeless.append(sequence)
            return
        server = min(serving, key=lambda server: server.load)
        server.advance(self._clock.now_s)
        server.submit(sequence)
        self._homes[sequence] = server
        self._wake_at_next_end(server)

    def cancel(self, sequence: Sequence) -> None:
        """Stop it; its tokens so far are stamped."""
        server = self._homes.pop(sequence, None)
        if server is None:
            self._homeless = [other for other in self._homeless if other is not sequence]
            return
        server.advance(self._clock.now_s)
        server.cancel(sequence)
        self._wake_at_next_end(server)

    def abandon(self) -> None:
        """The coordinator died: every stream and the publication under way end with it."""
        for server in self.servers:
            server.advance(self._clock.now_s)
            server.clear()
            server.is_paused = False
            self._wake_at_next_end(server)
        self._homes.clear()
        self._homeless.clear()
        if self._publishing is not None:
            self._publishing.cancelled = True
            self._publishing = None

    @property
    def is_publishing(self) -> bool:
        return self._publishing is not None

    def publish(self, version: int, on_served: Callable[[int], None]) -> None:
        """Send `version` to the servers there are now; `on_served` when all that are left of them serve it.

        A failed publication is repeated until it succeeds; a server that joins meanwhile waits for the next one.
        """
        session = [(server, server.num_boots) for server in self.servers if server.is_alive]
        scenario = self._scenario
        seconds = scenario.publication_s
        if scenario.chance("publication", self.num_publications) < scenario.failed_publication_fraction:
            seconds *= 2
        self.num_publications += 1
        self._publishing = self._clock.after(seconds, lambda: self._load(session, version, on_served))

    def _load(self, session: Session, version: int, on_served: Callable[[int], None]) -> None:
        for server in _left(session):
            server.advance(self._clock.now_s)
            server.is_paused = True
            self._wake_at_next_end(server)
        self._publishing = self._clock.after(
            self._scenario.pause_s, lambda: self._commit(session, version, on_served)
        )

    def _commit(self, session: Session, version: int, on_served: Callable[[int], None]) -> None:
        self._publishing = None
        left = _left(session)
        for server in left:
            server.advance(self._clock.now_s)
            server.is_paused = False
            server.commit(version)
            self._wake_at_next_end(server)
        homeless, self._homeless = self._homeless, []
        for sequence in homeless:
            self.submit(sequence)
        if left:
            on_served(version)
        if any(server.is_alive and server.version < 0 for server in self.servers):
            self._on_joiner()

    def _join(self, server: SimServer) -> None:
        server.advance(self._clock.now_s)
        server.boot()
        self._on_joiner()

    def _strike(self, fault: Fault) -> None:
        server = self.servers[fault.server]
        if not server.is_alive:
            return
        server.advance(self._clock.now_s)
        if fault.kind == "crash":
            server.is_alive = False
            for sequence in server.clear():
                del self._homes[sequence]
                self.submit(sequence)
            self._clock.after(fault.duration_s, lambda: self._join(server))
        elif fault.kind == "freeze":
            server.is_frozen = True
        else:
            server.slowness = _SLOWNESS
        self._wake_at_next_end(server)
        if fault.kind != "crash":
            self._clock.after(fault.duration_s, lambda: self._recover(server))

    def _recover(self, server: SimServer) -> None:
        server.advance(self._clock.now_s)
        server.is_frozen = False
        server.slowness = 1.0
        self._wake_at_next_end(server)

    def _wake_at_next_end(self, server: SimServer) -> None:
        event = self._wakes.pop(server, None)
        if event is not None:
            event.cancelled = True
        end_s = server.next_end_s()
        if end_s is not None:
            self._wakes[server] = self._clock.at(end_s, lambda: self._wake(server))

    def _wake(self, server: SimServer) -> None:
        del self._wakes[server]
        server.advance(self._clock.now_s)
        for sequence in server.take_ended():
            del self._homes[sequence]
            self._on_ended(sequence)
        self._wake_at_next_end(server)


def _left(session: Session) -> list[SimServer]:
    """Those that have not died since the publication began."""
    return [server for server, num_boots in session if server.is_alive and server.num_boots == num_boots]
