"""Every transition of the update state, and what a failure at each point costs."""

import pytest

from asyppo_async.fleet.call_error import CallError
from asyppo_async.fleet.update_state import NO_RUN, Phase, RunIdentity, Served, Session, UpdateState

RUN = RunIdentity(run_id="run", incarnation=0)
OTHER = RunIdentity(run_id="other", incarnation=0)


def session(identity: RunIdentity = RUN, epoch: int = 1, lease_s: float = 10.0) -> Session:
    return Session(identity=identity, epoch=epoch, lease_s=lease_s, world_size=2)


def at(phase: Phase, version: int = 5) -> UpdateState:
    """A state in this phase of an update to `version`."""
    state = UpdateState()
    state.open(session(), 0.0)
    if phase is Phase.OPEN:
        return state
    state.stage_begins(1, version)
    if phase is Phase.STAGING:
        return state
    state.stage_ends(version)
    if phase is Phase.STAGED:
        return state
    state.commit_begins(1, version)
    if phase is Phase.COMMITTING:
        return state
    state.commit_ends()
    return state


def test_verdict_when_passed_then_the_candidate_is_served() -> None:
    state = at(Phase.PROBATION)
    assert state.served == Served(identity=NO_RUN, version=0, load=0)
    state.judge(1, 5, True)
    assert state.served == Served(identity=RUN, version=5, load=1)
    assert state.phase is Phase.OPEN


def test_verdict_when_failed_then_weights_unknown_until_a_complete_update() -> None:
    state = at(Phase.PROBATION)
    state.judge(1, 5, False)
    assert state.served is None
    with pytest.raises(CallError, match="weights unknown"):
        state.check_generate(RUN)
    state.stage_begins(1, 5)
    state.stage_ends(5)
    state.commit_begins(1, 5)
    state.commit_ends()
    state.judge(1, 5, True)
    assert state.served == Served(identity=RUN, version=5, load=2)


@pytest.mark.parametrize("phase", [Phase.OPEN, Phase.STAGING, Phase.STAGED])
def test_failure_when_nothing_was_committed_then_old_version_serves(phase: Phase) -> None:
    state = at(phase)
    state.fail_stage()
    assert state.served == Served(identity=NO_RUN, version=0, load=0)
    state.check_generate(NO_RUN)
    with pytest.raises(CallError, match="no weight session is open"):
        state.stage_begins(1, 6)


def test_commit_when_refused_before_the_load_then_old_version_serves() -> None:
    state = at(Phase.COMMITTING)
    state.refuse_commit()
    state.check_generate(NO_RUN)
    assert state.phase is Phase.OPEN


def test_commit_when_the_load_breaks_then_weights_unknown() -> None:
    state = at(Phase.COMMITTING)
    state.break_update()
    assert state.served is None
    assert state.phase is Phase.OPEN


def test_commit_when_another_version_is_staged_then_refused() -> None:
    state = at(Phase.STAGED)
    with pytest.raises(CallError, match="version 5 is staged, not version 6"):
        state.commit_begins(1, 6)


@pytest.mark.parametrize(
    ("phase", "lost"), [(Phase.STAGED, False), (Phase.PROBATION, True)], ids=["staged", "probation"]
)
def test_lease_when_it_ends_then_reset(phase: Phase, lost: bool) -> None:
    state = at(phase)
    state.heard(3.0)
    assert state.lease_end_s() == 13.0
    assert state.expire() is lost
    assert (state.served is None) is lost
    assert state.lease_end_s() is None


def test_lease_when_no_update_is_under_way_then_never_ends() -> None:
    assert at(Phase.OPEN).lease_end_s() is None
    state = at(Phase.PROBATION)
    state.judge(1, 5, True)
    assert state.lease_end_s() is None


@pytest.mark.parametrize(
    "call",
    [
        lambda state: state.stage_begins(2, 6),
        lambda state: state.commit_begins(2, 5),
        lambda state: state.judge(2, 5, True),
        lambda state: state.rename(2, 6),
        lambda state: state.close(2),
    ],
    ids=["stage", "commit", "verdict", "rename", "close"],
)
def test_calls_when_of_another_epoch_then_refused(call: object) -> None:
    with pytest.raises(CallError, match="epoch 2"):
        call(at(Phase.OPEN))  # type: ignore[operator]


def test_open_when_epoch_does_not_grow_then_refused_even_after_close() -> None:
    state = at(Phase.OPEN)
    state.close(1)
    with pytest.raises(CallError, match="does not follow"):
        state.open(session(epoch=1), 0.0)
    state.open(session(epoch=2), 0.0)
    state.open(session(RunIdentity(run_id="run", incarnation=1), epoch=1), 0.0)
    with pytest.raises(CallError, match="does not follow"):
        state.open(session(epoch=9), 0.0)


@pytest.mark.parametrize("phase", [Phase.STAGED, Phase.PROBATION])
def test_open_when_another_run_is_updating_then_refused_until_its_lease_ends(phase: Phase) -> None:
    state = at(phase)
    with pytest.raises(CallError, match="'run', incarnation 0 is updating this server"):
        state.open(session(OTHER), 9.9)
    assert state.open(session(OTHER), 10.0) is (phase is Phase.PROBATION)


def test_open_when_same_run_is_on_probation_then_weights_are_lost() -> None:
    state = at(Phase.PROBATION)
    assert state.open(session(epoch=2), 0.0) is True
    assert state.served is None


def test_open_when_a_commit_runs_then_refused() -> None:
    with pytest.raises(CallError, match="a load is under way"):
        at(Phase.COMMITTING).open(session(epoch=2), 0.0)


def test_generate_when_another_run_is_served_then_refused() -> None:
    state = at(Phase.PROBATION)
    with pytest.raises(CallError, match="run 'run', incarnation 0, and the request is of no run"):
        state.check_generate(NO_RUN)
    state.check_generate(RUN)
    state.judge(1, 5, True)
    with pytest.raises(CallError, match="'other'"):
        state.check_generate(OTHER)


def test_rename_when_served_then_version_grows_and_load_stays() -> None:
    state = at(Phase.PROBATION)
    state.judge(1, 5, True)
    salt = state.salt
    assert state.rename(1, 6) == Served(identity=RUN, version=6, load=1)
    assert state.salt == salt
    with pytest.raises(CallError, match="version 5"):
        state.rename(1, 5)


def test_rename_when_nothing_of_this_run_is_served_then_refused() -> None:
    with pytest.raises(CallError, match="served at or before it"):
        at(Phase.OPEN).rename(1, 1)


def test_salt_when_one_version_is_loaded_twice_then_differs() -> None:
    state = at(Phase.PROBATION)
    first = state.salt
    state.judge(1, 5, True)
    assert state.salt == first
    state.stage_begins(1, 5)
    state.stage_ends(5)
    state.commit_begins(1, 5)
    assert state.salt == first  # the old weights still compute
    state.commit_ends()
    assert state.salt != first


def test_stage_when_older_than_served_then_refused() -> None:
    state = at(Phase.PROBATION)
    state.judge(1, 5, True)
    with pytest.raises(CallError, match="older than the served version 5"):
        state.stage_begins(1, 4)
