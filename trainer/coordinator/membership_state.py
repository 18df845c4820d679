"""Membership as a plain state machine: which servers are there, which may serve, and over whom a version is sent.

No I/O and no clock. The event loop's fleet (`membership`, `publish`) and the simulated one drive the same object.
"""

from dataclasses import dataclass
from typing import Literal

MemberState = Literal["joining", "serving", "lost"]


@dataclass(slots=True, kw_only=True)
class MemberRecord:
    """One server. Only the state machine writes it."""

    name: str
    state: MemberState
    version: int
    """Served; -1 before the first complete sending since it joined."""
    num_joins: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """One version on its way to the servers of one session."""

    number: int
    """Of sendings before it."""
    epoch: int
    """Of the session. It names one group of servers and never comes again once that group has changed or failed."""
    version: int
    names: tuple[str, ...]


class MembershipState:
    """Invariant: a server serves only after a sending that it belonged to from start to end has completed since it
    joined; all servers of a completed sending serve its version, and none serves a newer one; new work goes only to
    servers of that version that do not stand aside; at most one sending is open, and every server in it has been there
    since it opened and does not stand aside.
    """

    def __init__(self, *, debug: bool) -> None:
        """`debug`: every transition is followed by `check`."""
        self._debug = debug
        self._members: dict[str, MemberRecord] = {}
        self._aside: str | None = None
        self._sending: Sending | None = None
        self._is_loading = False
        self._num_sendings = 0
        self._epoch = 0
        self._group: tuple[str, ...] = ()
        """Who has met under the present epoch; empty: nobody, or somebody of it was lost."""
        self._last: dict[str, Sending] = {}
        """By server, the sending that it serves from."""
        self._joins_at_open: dict[str, int] = {}
        self._newest = -1
        """Version of the last completed sending."""

    @property
    def sending(self) -> Sending | None:
        """The one under way."""
        return self._sending

    @property
    def num_sendings(self) -> int:
        """Opened so far."""
        return self._num_sendings

    @property
    def aside(self) -> str | None:
        """The server that takes part in no sending and gets no new work, for the sake of an evaluation."""
        return self._aside

    @property
    def taking_part(self) -> tuple[str, ...]:
        """Whom the next sending goes to: it also brings up to date who has joined or had stood aside."""
        return tuple(
            name for name, member in self._members.items() if member.state != "lost" and name != self._aside
        )

    @property
    def current(self) -> tuple[str, ...]:
        """Who gets new work: who serves the newest version, for a group that was admitted at the served version must
        not begin on an older one.
        """
        return tuple(name for name in self.taking_part if self._serves_newest(name))

    @property
    def served_version(self) -> int:
        """What the fleet serves: the version of the last completed sending; -1 once none of its servers is left."""
        return self._newest if any(map(self._serves_newest, self._members)) else -1

    @property
    def has_joiners(self) -> bool:
        """Whether a server is there that waits for its first complete sending."""
        return any(member.state == "joining" for member in self._members.values())

    def is_lost(self, name: str) -> bool:
        """Whether the server is gone and has not joined again."""
        return self._members[name].state == "lost"

    def joined(self, name: str) -> None:
        """A new process under this name: it serves nothing, whatever it says that it has.

        Raises:
            ValueError: it is there already, and was not reported lost.
        """
        member = self._members.get(name)
        if member is not None and member.state != "lost":
            raise ValueError(f"server {name} is {member.state}, it cannot join again before it is lost")
        num_joins = 0 if member is None else member.num_joins
        self._members[name] = MemberRecord(name=name, state="joining", version=-1, num_joins=num_joins + 1)
        self._checked()

    def lost(self, name: str) -> bool:
        """The server is gone. True: it was in the open sending, which has ended; the version must be sent again."""
        member = self._members.get(name)
        if member is None or member.state == "lost":
            return False
        self._unserve(name, "lost")
        if name == self._aside:
            self._aside = None
        if name in self._group:
            self._group = ()
        breaks = self._sending is not None and name in self._sending.names
        if breaks:
            self._end_without_effect()
        self._checked()
        return breaks

    def set_aside(self, name: str) -> None:
        """This server keeps its version until `bring_back`.

        Raises:
            ValueError: a sending is open, one stands aside already, or nobody would be left for new work.
        """
        if self._sending is not None or self._aside is not None:
            raise ValueError(f"server {name} cannot stand aside: {self._aside or 'a sending'} comes first")
        if name not in self.current or len(self.current) < 2:
            raise ValueError(f"server {name} cannot stand aside, only {self.current} get new work")
        self._aside = name
        self._checked()

    def bring_back(self) -> None:
        """The next sending includes the one that stood aside; until then it gets new work only if it missed none."""
        self._aside = None
        self._checked()

    def open(self, version: int) -> Sending | None:
        """Send `version` to every server that takes part now. None: there is none.

        Raises:
            ValueError: a sending is open, or a newer version has been served.
        """
        if self._sending is not None:
            raise ValueError(f"sending {self._sending.number} is open; complete or abandon it first")
        names = self._sendable(version)
        if not names:
            return None
        if names != self._group:
            self._epoch += 1
            self._group = ()
        self._sending = self._next(version, names)
        self._joins_at_open = {name: self._members[name].num_joins for name in names}
        self._checked()
        return self._sending

    def met(self, sending: Sending) -> None:
        """The servers of the open sending have met under its epoch: the next one to the same servers reuses it."""
        self._require_open(sending)
        self._group = sending.names
        self._checked()

    def loading(self, sending: Sending) -> None:
        """From here until it is complete, weights are unknown where it ends without effect."""
        self._require_open(sending)
        self._is_loading = True
        self._checked()

    def completed(self, sending: Sending) -> bool:
        """The version has arrived everywhere and passed its probe. False: an old message, nothing happens."""
        if self._sending != sending:
            return False
        self._sending, self._is_loading = None, False
        self._serve(sending)
        self._checked()
        return True

    def renumbered(self, version: int) -> None:
        """No byte has changed, and everybody who takes part was told the new number.

        Raises:
            ValueError: a sending is open, or somebody who takes part has older weights.
        """
        names = self._sendable(version)
        if self._sending is not None or not names or names != self.current:
            raise ValueError(
                f"version {version} cannot be a new number only: {self.current} of {names} have its bytes"
            )
        self._serve(self._next(version, names))
        self._checked()

    def abandoned(self) -> None:
        """The sending under way ends without effect: the old versions go on serving, unless servers were loading."""
        self._end_without_effect()
        self._checked()

    def new_incarnation(self) -> None:
        """The trainer came back from a checkpoint: nobody serves before it has published."""
        self._sending, self._aside, self._is_loading = None, None, False
        self._group = ()
        self._newest = -1
        for name in list(self._last):
            self._unserve(name, "joining")
        self._checked()

    def check(self) -> None:
        """Raises `AssertionError` with the sentence that does not hold."""
        for member in self._members.values():
            last = self._last.get(member.name)
            assert (member.state == "serving") == (last is not None), (
                f"a server serves only after a complete sending: {member}"
            )
            assert member.version == (-1 if last is None else last.version), (
                f"a server serves the version of its last complete sending: {member}"
            )
            assert member.version <= self._newest, (
                f"none serves a newer version than {self._newest}: {member}"
            )
        assert self._aside is None or self._members[self._aside].state == "serving", (
            f"only a server with a version to keep stands aside: {self._aside}"
        )
        assert not self._group or all(self._members[name].state != "lost" for name in self._group), (
            f"a session with a lost server is not used again: {self._group}"
        )
        for name in () if self._sending is None else self._sending.names:
            member = self._members[name]
            assert member.state != "lost" and member.num_joins == self._joins_at_open[name], (
                f"every server of the open sending has been there since it opened: {member}"
            )
            assert name != self._aside, f"no server of the open sending stands aside: {member}"

    def _serves_newest(self, name: str) -> bool:
        member = self._members[name]
        return member.state == "serving" and member.version == self._newest

    def _sendable(self, version: int) -> tuple[str, ...]:
        if version < self._newest:
            raise ValueError(
                f"version {version} cannot be sent, version {self._newest} has been served already"
            )
        return self.taking_part

    def _next(self, version: int, names: tuple[str, ...]) -> Sending:
        sending = Sending(number=self._num_sendings, epoch=self._epoch, version=version, names=names)
        self._num_sendings += 1
        return sending

    def _serve(self, sending: Sending) -> None:
        self._newest = sending.version
        for name in sending.names:
            member = self._members[name]
            member.state, member.version = "serving", sending.version
            self._last[name] = sending

    def _unserve(self, name: str, state: MemberState) -> None:
        member = self._members[name]
        member.state, member.version = state, -1
        self._last.pop(name, None)

    def _end_without_effect(self) -> None:
        """The group that was sending is broken: the next sending meets anew."""
        sending, was_loading = self._sending, self._is_loading
        self._sending, self._is_loading, self._group = None, False, ()
        for name in sending.names if sending is not None and was_loading else ():
            if self._members[name].state != "lost":
                self._unserve(name, "joining")

    def _require_open(self, sending: Sending) -> None:
        if self._sending != sending:
            raise ValueError(f"sending {sending.number} is not under way")

    def _checked(self) -> None:
        if self._debug:
            self.check()
