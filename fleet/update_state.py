"""The state of a server's weights and of the session that updates them: transitions only, no I/O, no clock.

    staged, folder:  CLOSED -> OPEN -> STAGING   -> STAGED   -> COMMITTING -> PROBATION -> OPEN ...
    direct:          CLOSED -> OPEN -> RECEIVING -> RECEIVED -> COMMITTING -> PROBATION -> OPEN ...

A failure up to the moment at which the engine begins to load leaves the served weights as they were: that is within
COMMITTING, in the direct way within RECEIVING. From then on nothing is served until a verdict has passed.
"""

from dataclasses import dataclass
from enum import Enum, auto

from asyppo_async.fleet.call_error import CallError


class Phase(Enum):
    CLOSED = auto()
    OPEN = auto()
    STAGING = auto()
    STAGED = auto()
    RECEIVING = auto()
    RECEIVED = auto()
    COMMITTING = auto()
    PROBATION = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    run_id: str
    incarnation: int


NO_RUN = RunIdentity(run_id="", incarnation=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    identity: RunIdentity
    version: int
    load: int
    """Loads of bytes since the server started; tells two loads of one version apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    identity: RunIdentity
    epoch: int
    lease_s: float
    world_size: int
    """Ranks that meet, the sender included."""


class UpdateState:
    def __init__(self) -> None:
        self.phase = Phase.CLOSED
        self.served: Served | None = Served(identity=NO_RUN, version=0, load=0)
        """None: the weights are unknown."""
        self.candidate: Served | None = None
        """What is being loaded or is on probation."""
        self.session: Session | None = None
        self._num_loads = 0
        self._staged_version: int | None = None
        self._heard_s = 0.0

    @property
    def is_updating(self) -> bool:
        return self.phase in (Phase.RECEIVING, Phase.RECEIVED, Phase.COMMITTING, Phase.PROBATION)

    @property
    def is_loading(self) -> bool:
        """A call is under way that nothing but its own end can end."""
        return self.phase in (Phase.RECEIVING, Phase.COMMITTING)

    @property
    def salt(self) -> str:
        """KV may be shared between requests that start under one load of weights, and no others.

        While a commit is under way the old weights still compute, until nothing is handed over any more.
        """
        loaded = self.candidate if self.phase is Phase.PROBATION else self.served
        return f"load-{loaded.load}" if loaded is not None else "none"

    @property
    def open_session(self) -> Session | None:
        """The session that the next update may come over."""
        return self.session if self.phase is not Phase.CLOSED else None

    def check_generate(self, identity: RunIdentity) -> None:
        """Raise where a request of this run cannot be served by what is here or on its way."""
        current = self.candidate if self.is_updating else self.served
        if current is None:
            raise CallError(
                "FAILED_PRECONDITION",
                "weights unknown: the last update failed; publish a complete version first",
            )
        if current.identity != identity:
            raise CallError(
                "FAILED_PRECONDITION",
                f"this server holds the weights of {_named(current.identity)}, and the request is of "
                f"{_named(identity)}; publish before generating",
            )

    def open(self, session: Session, now_s: float) -> bool:
        """Begin a session in the place of any other; True if that costs the weights (one was on probation)."""
        old = self.session
        if old is not None:
            self._check_successor(old, session, now_s)
        if self.is_loading:
            raise CallError(
                "RESOURCE_EXHAUSTED", "a load is under way; open the session again when it has ended"
            )
        lost = self._end_update()
        self.session = session
        self.phase = Phase.OPEN
        self._heard_s = now_s
        return lost

    def check_epoch(self, epoch: int) -> Session:
        """The open session, if it is of this epoch."""
        if self.session is None or self.phase is Phase.CLOSED:
            raise CallError("FAILED_PRECONDITION", f"epoch {epoch}: no weight session is open; open one")
        if self.session.epoch != epoch:
            raise CallError(
                "FAILED_PRECONDITION", f"epoch {epoch}: the session's epoch is {self.session.epoch}"
            )
        return self.session

    def stage_begins(self, epoch: int, version: int) -> None:
        self._check_not_older(self._expect(epoch, Phase.OPEN, Phase.STAGED), version)
        self.phase = Phase.STAGING
        self._staged_version = None

    def stage_ends(self, version: int) -> None:
        self.phase = Phase.STAGED
        self._staged_version = version

    def fail_stage(self) -> None:
        """The process group is in an unknown state in the middle of a collective, so the session is over."""
        self._end_update()
        self._close()

    def receive_begins(self, epoch: int, version: int) -> Served:
        session = self._expect(epoch, Phase.OPEN)
        self._check_not_older(session, version)
        self.phase = Phase.RECEIVING
        return self._new_candidate(session, version)

    def receive_ends(self) -> None:
        self.phase = Phase.RECEIVED

    def commit_begins(self, epoch: int, version: int) -> Served:
        session = self._expect(epoch, Phase.STAGED, Phase.RECEIVED)
        candidate = self.candidate
        if candidate is not None:
            if version != candidate.version:
                raise CallError(
                    "FAILED_PRECONDITION", f"version {candidate.version} is loaded, not version {version}"
                )
            self.phase = Phase.COMMITTING
            return candidate
        if version != self._staged_version:
            raise CallError(
                "FAILED_PRECONDITION", f"version {self._staged_version} is staged, not version {version}"
            )
        self.phase = Phase.COMMITTING
        return self._new_candidate(session, version)

    def refuse_commit(self) -> None:
        """Nothing was touched: the old version goes on serving."""
        self.candidate = None
        self._staged_version = None
        self.phase = Phase.OPEN

    def break_update(self) -> None:
        """The engine failed in the middle of a load: a mixture."""
        self.served = None
        self.refuse_commit()

    def commit_ends(self) -> None:
        self._staged_version = None
        self.phase = Phase.PROBATION

    def check_probe(self, epoch: int, version: int) -> Served:
        self._expect(epoch, Phase.PROBATION)
        candidate = self.candidate
        if candidate is None or candidate.version != version:
            raise CallError("FAILED_PRECONDITION", f"version {version} is not on probation")
        return candidate

    def judge(self, epoch: int, version: int, passed: bool) -> None:
        candidate = self.check_probe(epoch, version)
        self.served = candidate if passed else None
        self.candidate = None
        self.phase = Phase.OPEN

    def rename(self, epoch: int, version: int) -> Served:
        """A new version number for the weights that are served."""
        session = self._expect(epoch, Phase.OPEN, Phase.STAGED)
        served = self.served
        if served is None or served.identity != session.identity or version < served.version:
            raise CallError(
                "FAILED_PRECONDITION",
                f"version {version} can only name weights of this session's run that are served at or before it; "
                f"served: {served}",
            )
        self.served = Served(identity=served.identity, version=version, load=served.load)
        return self.served

    def close(self, epoch: int) -> bool:
        """True if that costs the weights."""
        self.check_epoch(epoch)
        if self.is_loading:
            raise CallError("ABORTED", "a load is under way; close the session when it has ended")
        lost = self._end_update()
        self._close()
        return lost

    def heard(self, now_s: float) -> None:
        self._heard_s = now_s

    def lease_end_s(self) -> float | None:
        """When the update is reset unless the sender is heard of; None: no update waits for its sender."""
        if self.session is None or self.phase not in (
            Phase.STAGED,
            Phase.RECEIVED,
            Phase.PROBATION,
        ):
            return None
        return self._heard_s + self.session.lease_s

    def expire(self) -> bool:
        """The lease ended; True if that costs the weights."""
        lost = self._end_update()
        self._close()
        return lost

    def _check_successor(self, old: Session, new: Session, now_s: float) -> None:
        if old.identity.run_id == new.identity.run_id:
            if (new.identity.incarnation, new.epoch) <= (old.identity.incarnation, old.epoch):
                raise CallError(
                    "FAILED_PRECONDITION",
                    f"session {new.identity.incarnation}/{new.epoch} (incarnation/epoch) does not follow "
                    f"{old.identity.incarnation}/{old.epoch}",
                )
            return
        lease_end_s = self.lease_end_s()
        if self.phase in (Phase.STAGING, Phase.RECEIVING) or (
            lease_end_s is not None and now_s < lease_end_s
        ):
            raise CallError(
                "FAILED_PRECONDITION",
                f"{_named(old.identity)} is updating this server; wait for it to end, or for its lease of "
                f"{old.lease_s:g} s",
            )

    def _check_not_older(self, session: Session, version: int) -> None:
        served = self.served
        if served is not None and served.identity == session.identity and version < served.version:
            raise CallError(
                "FAILED_PRECONDITION", f"version {version} is older than the served version {served.version}"
            )

    def _new_candidate(self, session: Session, version: int) -> Served:
        self._num_loads += 1
        self.candidate = Served(identity=session.identity, version=version, load=self._num_loads)
        return self.candidate

    def _expect(self, epoch: int, *phases: Phase) -> Session:
        session = self.check_epoch(epoch)
        if self.phase not in phases:
            raise CallError(
                "FAILED_PRECONDITION",
                f"the update is {self.phase.name}; this call needs {' or '.join(phase.name for phase in phases)}",
            )
        return session

    def _end_update(self) -> bool:
        lost = self.phase in (Phase.RECEIVED, Phase.PROBATION)
        if lost:
            self.served = None
        self.candidate = None
        self._staged_version = None
        return lost

    def _close(self) -> None:
        """The session stays known, so that its epoch cannot be used again."""
        self.phase = Phase.CLOSED


def _named(identity: RunIdentity) -> str:
    if identity == NO_RUN:
        return "no run (the checkpoint it was started with)"
    return f"run {identity.run_id!r}, incarnation {identity.incarnation}"
