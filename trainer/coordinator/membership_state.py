"""Membership as a plain state machine: which servers are there, which may serve, and over whom a version is sent.

No I/O and no clock. The simulated fleet drives it; the event loop's part is `weight_session` and `membership`.
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
    """Served; -1 before the first complete publication since it joined."""
    num_joins: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Who receives a version together. A change of membership ends it; its epoch never comes again."""

    epoch: int
    version: int
    names: tuple[str, ...]


class MembershipState:
    """Invariant: a server serves only after a publication to a session that it belonged to from start to end has
    completed since it joined; all members of a completed session serve its version; the version of the fleet, the
    oldest of the serving ones, never falls while one of them is left; at most one session is open, and every server
    in it has been there since it opened.
    """

    def __init__(self, *, debug: bool) -> None:
        """`debug`: every transition is followed by `check`."""
        self._debug = debug
        self._members: dict[str, MemberRecord] = {}
        self._session: Session | None = None
        self._num_sessions = 0
        self._completed: dict[str, Session] = {}
        """By server, the session that it serves from."""
        self._joins_at_open: dict[str, int] = {}
        self._floor = -1

    @property
    def session(self) -> Session | None:
        """The publication under way."""
        return self._session

    @property
    def num_sessions(self) -> int:
        """Opened so far: the epoch of the next one."""
        return self._num_sessions

    @property
    def served_version(self) -> int:
        """What the whole fleet serves: the oldest version of the serving servers; -1 if none serves."""
        return min(
            (member.version for member in self._members.values() if member.state == "serving"), default=-1
        )

    @property
    def has_joiners(self) -> bool:
        """Whether a server is there that waits for its first publication."""
        return any(member.state == "joining" for member in self._members.values())

    def serves(self, name: str) -> bool:
        """Whether requests may go to this server."""
        member = self._members.get(name)
        return member is not None and member.state == "serving"

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
        """The server is gone. True: it was in the open session, which has ended; the version must be sent again."""
        member = self._members.get(name)
        if member is None or member.state == "lost":
            return False
        member.state, member.version = "lost", -1
        self._completed.pop(name, None)
        if not any(other.state == "serving" for other in self._members.values()):
            self._floor = -1
        breaks = self._session is not None and name in self._session.names
        if breaks:
            self._session = None
        self._checked()
        return breaks

    def open_session(self, version: int) -> Session | None:
        """Send `version` to every server that is there now. None: there is none.

        Raises:
            ValueError: a session is open, or a server serves a newer version.
        """
        if self._session is not None:
            raise ValueError(f"session {self._session.epoch} is open; complete or abandon it first")
        newest = max((member.version for member in self._members.values()), default=-1)
        if version < newest:
            raise ValueError(f"version {version} cannot be sent, a server serves {newest} already")
        there = [member for member in self._members.values() if member.state != "lost"]
        if not there:
            return None
        names = tuple(member.name for member in there)
        self._session = Session(epoch=self._num_sessions, version=version, names=names)
        self._num_sessions += 1
        self._joins_at_open = {member.name: member.num_joins for member in there}
        self._checked()
        return self._session

    def completed(self, epoch: int) -> bool:
        """The version has arrived everywhere and passed its probe. False: an old message, nothing happens."""
        session = self._session
        if session is None or session.epoch != epoch:
            return False
        for name in session.names:
            member = self._members[name]
            member.state, member.version = "serving", session.version
            self._completed[name] = session
        self._session = None
        self._checked()
        self._floor = self.served_version
        return True

    def abandoned(self) -> None:
        """The publication under way ends without effect: the old versions go on serving."""
        self._session = None
        self._checked()

    def new_incarnation(self) -> None:
        """The trainer came back from a checkpoint: nobody serves before it has published."""
        self._session = None
        self._completed.clear()
        self._floor = -1
        for member in self._members.values():
            if member.state == "serving":
                member.state, member.version = "joining", -1
        self._checked()

    def check(self) -> None:
        """Raises `AssertionError` with the sentence that does not hold."""
        for member in self._members.values():
            session = self._completed.get(member.name)
            assert (member.state == "serving") == (session is not None), (
                f"a server serves only after a complete publication: {member}"
            )
            assert member.version == (-1 if session is None else session.version), (
                f"a server serves the version of its last complete session: {member}"
            )
        served = self.served_version
        assert served < 0 or served >= self._floor, (
            f"the version of the fleet never falls: {served} after {self._floor}"
        )
        for name in () if self._session is None else self._session.names:
            member = self._members[name]
            assert member.state != "lost" and member.num_joins == self._joins_at_open[name], (
                f"every server of the open session has been there since it opened: {member}"
            )

    def _checked(self) -> None:
        if self._debug:
            self.check()
