"""The simulated fleet: dispatch to the least loaded server, publications, joiners and server faults."""

from collections.abc import Callable
from functools import partial

from asyppo_async.trainer.coordinator.membership_state import MembershipState, Sending
from asyppo_async.trainer.coordinator.simulate.clock import Event, VirtualClock
from asyppo_async.trainer.coordinator.simulate.scenario import Fault, Scenario
from asyppo_async.trainer.coordinator.simulate.server import Sequence, SimServer

_SLOWNESS = 10.0


class SimFleet:
    """Servers as the coordinator sees them: sequences in, ended sequences out, a publication at a time.

    Who is there, who may serve and who receives a version is decided by `MembershipState`.
    """

    def __init__(
        self,
        scenario: Scenario,
        clock: VirtualClock,
        *,
        debug: bool,
        on_ended: Callable[[Sequence], None],
        on_joiner: Callable[[], None],
    ) -> None:
        """`on_joiner`: a server is there that serves nothing yet."""
        self._scenario = scenario
        self._clock = clock
        self._on_ended = on_ended
        self._on_joiner = on_joiner
        self.servers = {f"s{index}": SimServer(plan) for index, plan in enumerate(scenario.servers)}
        self.members = MembershipState(debug=debug)
        self._wakes: dict[SimServer, Event] = {}
        self._homeless: list[list[Sequence]] = []
        """Sequences while no server serves."""
        self._homes: dict[Sequence, SimServer] = {}
        self._publishing: Event | None = None
        self._on_served: Callable[[int], None] = lambda version: None
        self.num_publications = 0
        for name, server in self.servers.items():
            if server.plan.joins_s > 0:
                server.is_alive = False
                clock.at(server.plan.joins_s, partial(self._join, name))
            else:
                self.members.joined(name)
        for fault in scenario.faults:
            if fault.kind != "kill_coordinator":
                clock.at(fault.at_s, partial(self._strike, fault))

    def submit(self, sequences: list[Sequence]) -> None:
        """All of them to the least loaded server that serves; kept if there is none."""
        serving = [self.servers[name] for name in self.members.current]
        if not serving:
            self._homeless.append(sequences)
            return
        server = min(serving, key=lambda server: server.load)
        server.advance(self._clock.now_s)
        server.submit(sequences)
        self._homes.update(dict.fromkeys(sequences, server))
        self._wake_at_next_end(server)

    def cancel(self, sequence: Sequence) -> None:
        """Stop it; its tokens so far are stamped."""
        server = self._homes.pop(sequence, None)
        if server is None:
            for group in self._homeless:
                group[:] = [other for other in group if other is not sequence]
            return
        server.advance(self._clock.now_s)
        server.cancel(sequence)
        self._wake_at_next_end(server)

    def abandon(self) -> None:
        """The coordinator died: every stream and the publication under way end with it."""
        for server in self.servers.values():
            server.advance(self._clock.now_s)
            server.clear()
            server.is_paused = False
            self._wake_at_next_end(server)
        self._homes.clear()
        self._homeless.clear()
        self._end_publication()
        self.members.new_incarnation()

    @property
    def is_publishing(self) -> bool:
        return self._publishing is not None

    @property
    def occupied_s(self) -> float:
        """Sequences running on all servers, integrated over time until now."""
        for server in self.servers.values():
            server.advance(self._clock.now_s)
        return sum(server.occupied_s for server in self.servers.values())

    def publish(self, version: int, on_served: Callable[[int], None]) -> None:
        """Send `version` to the servers there are now; `on_served` when all of them serve it.

        A failed publication, or one whose receiver died, is repeated until it succeeds; a server that joins
        meanwhile waits for the next one. Without a server nothing is sent before one joins.
        """
        sending = self.members.open(version)
        if sending is None:
            return
        self.members.met(sending)
        scenario = self._scenario
        seconds = scenario.publication_s
        if scenario.happens(scenario.failed_publication_fraction, "publication", self.num_publications):
            seconds *= 2
        self.num_publications += 1
        self._on_served = on_served
        self._publishing = self._clock.after(seconds, lambda: self._load(sending))

    def _load(self, sending: Sending) -> None:
        if self._scenario.weights == "direct":
            self.members.loading(sending)
        for server in self._servers_of(sending):
            server.advance(self._clock.now_s)
            server.is_paused = True
            self._wake_at_next_end(server)
        self._publishing = self._clock.after(self._scenario.pause_s, lambda: self._commit(sending))

    def _commit(self, sending: Sending) -> None:
        self._publishing = None
        self.members.completed(sending)
        recompute = self._scenario.kv_on_update == "recompute"
        for server in self._servers_of(sending):
            server.advance(self._clock.now_s)
            server.is_paused = False
            server.commit(sending.version, recompute=recompute)
            self._wake_at_next_end(server)
        homeless, self._homeless = self._homeless, []
        for sequences in homeless:
            self.submit(sequences)
        self._on_served(sending.version)
        if self.members.has_joiners:
            self._on_joiner()

    def _servers_of(self, sending: Sending) -> list[SimServer]:
        return [self.servers[name] for name in sending.names]

    def _end_publication(self) -> None:
        if self._publishing is not None:
            self._publishing.cancelled = True
            self._publishing = None

    def _join(self, name: str) -> None:
        server = self.servers[name]
        server.advance(self._clock.now_s)
        server.boot()
        self.members.joined(name)
        self._on_joiner()

    def _strike(self, fault: Fault) -> None:
        name = f"s{fault.server}"
        server = self.servers[name]
        if not server.is_alive:
            return
        server.advance(self._clock.now_s)
        if fault.kind == "crash":
            self._crash(name, server)
            self._clock.after(fault.duration_s, lambda: self._join(name))
            return
        if fault.kind == "pin":
            self._pin(name, fault.duration_s)
            return
        if fault.kind == "freeze":
            server.is_frozen = True
        else:
            server.slowness = _SLOWNESS
        self._wake_at_next_end(server)
        self._clock.after(fault.duration_s, lambda: self._recover(server))

    def _pin(self, name: str, duration_s: float) -> None:
        """An evaluation keeps a version: as in the event loop, unless that would leave nobody to train with."""
        current = self.members.current
        if (
            self.members.sending is None
            and self.members.aside is None
            and name in current
            and len(current) > 1
        ):
            self.members.set_aside(name)
            self._clock.after(duration_s, self._unpin)

    def _unpin(self) -> None:
        self.members.bring_back()
        if not self.members.current:
            self._on_joiner()

    def _crash(self, name: str, server: SimServer) -> None:
        """Its sequences go elsewhere with the tokens that had arrived; a publication to it is sent again at once."""
        server.is_alive = False
        sending = self.members.sending
        breaks = self.members.lost(name)
        for sequence in server.clear():
            del self._homes[sequence]
            self.submit([sequence])
        self._wake_at_next_end(server)
        if breaks and sending is not None:
            self._end_publication()
            for other in self._servers_of(sending):
                other.advance(self._clock.now_s)
                # With the old weights gone a server releases nothing before the repeat is complete.
                other.is_paused = other.is_paused and self._scenario.weights == "direct"
                self._wake_at_next_end(other)
            self.publish(sending.version, self._on_served)

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
