"""Who may serve: only servers that a complete publication reached since they joined."""

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from asyppo_async.trainer.coordinator.membership_state import MembershipState


def members_of(*names: str) -> MembershipState:
    members = MembershipState(debug=True)
    for name in names:
        members.joined(name)
    return members


def publish(members: MembershipState, version: int) -> None:
    session = members.open_session(version)
    assert session is not None
    assert members.completed(session.epoch)


def test_server_when_it_has_joined_serves_nothing_before_a_publication() -> None:
    members = members_of("a", "b")
    assert not members.serves("a")
    assert members.served_version == -1
    publish(members, 0)
    assert members.serves("a") and members.serves("b")
    assert members.served_version == 0


def test_joiner_when_a_publication_is_under_way_waits_for_the_next_one() -> None:
    members = members_of("a")
    session = members.open_session(0)
    assert session is not None
    members.joined("b")
    assert members.completed(session.epoch)
    assert not members.serves("b")
    assert members.has_joiners
    publish(members, 0)
    assert members.serves("b")


def test_publication_when_a_receiver_is_lost_ends_and_is_sent_again_to_those_left() -> None:
    members = members_of("a", "b")
    publish(members, 0)
    broken = members.open_session(1)
    assert broken is not None
    assert members.lost("b")
    assert members.session is None
    assert members.serves("a") and members.served_version == 0
    again = members.open_session(1)
    assert again is not None
    assert again.names == ("a",)
    assert again.epoch > broken.epoch
    assert not members.completed(broken.epoch)
    assert members.served_version == 0
    assert members.completed(again.epoch)
    assert members.served_version == 1


def test_server_when_it_comes_back_is_a_joiner_whatever_it_had() -> None:
    members = members_of("a", "b")
    publish(members, 3)
    assert not members.lost("b")
    members.joined("b")
    assert not members.serves("b")
    assert members.served_version == 3
    with pytest.raises(ValueError, match="server b is joining"):
        members.joined("b")


def test_fleet_when_the_trainer_comes_back_serves_nothing_before_it_has_published() -> None:
    members = members_of("a")
    publish(members, 7)
    members.new_incarnation()
    assert members.served_version == -1
    publish(members, 5)
    assert members.served_version == 5


def test_session_when_one_is_open_or_the_version_is_older_is_refused() -> None:
    members = members_of("a")
    publish(members, 2)
    with pytest.raises(ValueError, match="a server serves 2 already"):
        members.open_session(1)
    session = members.open_session(3)
    assert session is not None
    with pytest.raises(ValueError, match=f"session {session.epoch} is open"):
        members.open_session(3)
    members.abandoned()
    assert members.served_version == 2
    assert members.open_session(3) is not None


def test_session_when_nobody_is_there_is_not_opened() -> None:
    members = members_of("a")
    members.lost("a")
    assert members.open_session(0) is None


@hypothesis_settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from("jloca"), st.integers(0, 3)), max_size=40))
def test_invariant_when_anything_happens_in_any_order_holds(events: list[tuple[str, int]]) -> None:
    """`debug` checks the sentence after every transition; here also what the fleet was told from outside."""
    members = MembershipState(debug=True)
    there: set[str] = set()
    reached: set[str] = set()
    version = 0
    for kind, number in events:
        name = f"s{number}"
        if kind == "j" and name not in there:
            members.joined(name)
            there.add(name)
        elif kind == "l":
            members.lost(name)
            there.discard(name)
            reached.discard(name)
        elif kind == "o" and members.session is None:
            version += number
            members.open_session(version)
        elif kind == "c" and members.session is not None:
            reached |= set(members.session.names)
            assert members.completed(members.session.epoch)
        elif kind == "a":
            members.abandoned()
        assert {name for name in there if members.serves(name)} == reached
