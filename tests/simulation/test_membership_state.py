"""Who may serve: only servers that a complete sending reached since they joined; and who gets new work."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from asyppo_async.trainer.coordinator.membership_state import MembershipState, Sending


def members_of(*names: str) -> MembershipState:
    members = MembershipState(debug=True)
    for name in names:
        members.joined(name)
    return members


def opened(members: MembershipState, version: int) -> Sending:
    sending = members.open(version)
    assert sending is not None
    return sending


def publish(members: MembershipState, version: int) -> Sending:
    sending = opened(members, version)
    members.met(sending)
    members.loading(sending)
    assert members.completed(sending)
    return sending


def test_server_when_it_has_joined_serves_nothing_before_a_publication() -> None:
    members = members_of("a", "b")
    assert members.current == () and members.served_version == -1
    publish(members, 0)
    assert members.current == ("a", "b") and members.served_version == 0


def test_joiner_when_a_publication_is_under_way_waits_for_the_next_one() -> None:
    members = members_of("a")
    sending = opened(members, 0)
    members.joined("b")
    assert members.completed(sending)
    assert members.current == ("a",) and members.has_joiners
    assert publish(members, 0).epoch > sending.epoch, "the group has changed"
    assert members.current == ("a", "b") and not members.has_joiners


def test_epoch_when_the_group_stays_is_reused_and_when_it_changes_or_fails_never() -> None:
    members = members_of("a", "b")
    first = publish(members, 0)
    assert publish(members, 1).epoch == publish(members, 2).epoch == first.epoch
    members.set_aside("a")
    without = publish(members, 3)
    assert (without.names, without.epoch) == (("b",), first.epoch + 1)
    members.bring_back()
    assert publish(members, 4).epoch == first.epoch + 2
    opened(members, 5)
    members.abandoned()
    assert opened(members, 5).epoch == first.epoch + 3, (
        "a group in which a collective failed is not used again"
    )
    members.abandoned()
    assert opened(members, 5).epoch == first.epoch + 4, "nor one that never met"


def test_publication_when_a_receiver_is_lost_ends_and_is_sent_again_to_those_left() -> None:
    members = members_of("a", "b")
    publish(members, 0)
    broken = opened(members, 1)
    assert members.lost("b")
    assert members.sending is None
    assert members.current == ("a",) and members.served_version == 0
    again = opened(members, 1)
    assert again.names == ("a",) and again.epoch > broken.epoch
    assert not members.completed(broken)
    assert members.served_version == 0
    assert members.completed(again) and members.served_version == 1


def test_publication_when_a_receiver_is_lost_while_loading_leaves_nobody_to_serve_until_the_repeat() -> None:
    members = members_of("a", "b")
    publish(members, 0)
    members.loading(opened(members, 1))
    assert members.lost("b")
    assert members.current == () and members.served_version == -1, "their weights are unknown"
    publish(members, 1)
    assert members.current == ("a",) and members.served_version == 1


def test_server_when_it_comes_back_is_a_joiner_whatever_it_had() -> None:
    members = members_of("a", "b")
    publish(members, 3)
    assert not members.lost("b")
    members.joined("b")
    assert members.current == ("a",) and members.served_version == 3
    with pytest.raises(ValueError, match="server b is joining"):
        members.joined("b")


def test_server_when_it_stands_aside_keeps_its_version_and_gets_no_new_work_before_it_is_up_to_date() -> None:
    members = members_of("a", "b")
    publish(members, 0)
    members.set_aside("a")
    assert members.current == ("b",) and members.taking_part == ("b",)
    publish(members, 1)
    assert members.served_version == 1, "of the servers in the session"
    members.bring_back()
    assert members.current == ("b",) and members.taking_part == ("a", "b")
    with pytest.raises(ValueError, match=r"only \('b',\) get new work"):
        members.set_aside("b")
    with pytest.raises(ValueError, match="cannot be a new number only"):
        members.renumbered(2)
    publish(members, 2)
    assert members.current == ("a", "b")
    members.set_aside("a")
    members.bring_back()
    assert members.current == ("a", "b"), "it missed nothing"


def test_server_that_stands_aside_when_the_others_are_lost_does_not_serve_for_them() -> None:
    members = members_of("a", "b")
    publish(members, 0)
    members.set_aside("a")
    publish(members, 1)
    members.lost("b")
    assert members.served_version == -1 and members.current == ()
    assert members.open(2) is None
    members.bring_back()
    assert members.current == (), "its version is older than what groups were admitted at"
    publish(members, 2)
    assert members.current == ("a",)


def test_number_when_no_byte_has_changed_is_served_without_a_sending() -> None:
    members = members_of("a", "b")
    with pytest.raises(ValueError, match="cannot be a new number only"):
        members.renumbered(1)
    publish(members, 0)
    members.renumbered(1)
    assert members.served_version == 1 and members.current == ("a", "b")
    with pytest.raises(ValueError, match="version 1 has been served already"):
        members.renumbered(0)


def test_fleet_when_the_trainer_comes_back_serves_nothing_before_it_has_published() -> None:
    members = members_of("a", "b")
    publish(members, 7)
    members.set_aside("a")
    members.new_incarnation()
    assert members.served_version == -1 and members.aside is None
    publish(members, 5)
    assert members.served_version == 5 and members.current == ("a", "b")


def test_sending_when_one_is_open_or_the_version_is_older_is_refused() -> None:
    members = members_of("a", "b")
    publish(members, 2)
    with pytest.raises(ValueError, match="version 2 has been served already"):
        members.open(1)
    sending = opened(members, 3)
    with pytest.raises(ValueError, match=f"sending {sending.number} is open"):
        members.open(3)
    with pytest.raises(ValueError, match="a sending comes first"):
        members.set_aside("a")
    members.abandoned()
    assert members.served_version == 2
    with pytest.raises(ValueError, match="is not under way"):
        members.loading(sending)
    opened(members, 3)


def test_sending_when_nobody_is_there_is_not_opened() -> None:
    members = members_of("a")
    members.lost("a")
    assert members.open(0) is None


NAMES = st.sampled_from(["s0", "s1", "s2", "s3"])


class Anything(RuleBasedStateMachine):
    """Every event in any order; `debug` checks the sentence, here also what the fleet was told from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.members = MembershipState(debug=True)
        self.has: dict[str, int] = {}
        """Version that each server has, as far as the outside knows; -1: none that it may serve."""
        self.epochs: dict[int, tuple[str, ...]] = {}
        self.newest = -1
        self.is_loading = False

    def under_way(self) -> Sending:
        assert self.members.sending is not None
        return self.members.sending

    @rule(name=NAMES)
    def join(self, name: str) -> None:
        if name not in self.has:
            self.members.joined(name)
            self.has[name] = -1

    @rule(name=NAMES)
    def lose(self, name: str) -> None:
        sending = self.members.sending
        breaks = sending is not None and name in sending.names and name in self.has
        assert self.members.lost(name) == breaks
        self.has.pop(name, None)
        if breaks and sending is not None:
            self.end(sending)

    @precondition(lambda self: self.members.sending is None)
    @rule(number=st.integers(0, 2))
    def open(self, number: int) -> None:
        sending = self.members.open(max(0, self.newest) + number)
        if sending is not None:
            assert self.epochs.setdefault(sending.epoch, sending.names) == sending.names
            assert sending.epoch == max(self.epochs)

    @precondition(lambda self: self.members.sending is not None)
    @rule(loads=st.booleans())
    def meet(self, loads: bool) -> None:
        self.members.met(self.under_way())
        if loads:
            self.members.loading(self.under_way())
            self.is_loading = True

    @precondition(lambda self: self.members.sending is not None)
    @rule()
    def complete(self) -> None:
        sending = self.under_way()
        assert self.members.completed(sending) and not self.members.completed(sending)
        self.has |= dict.fromkeys(sending.names, sending.version)
        self.newest, self.is_loading = sending.version, False

    @precondition(lambda self: self.members.sending is not None)
    @rule()
    def abandon(self) -> None:
        sending = self.under_way()
        self.members.abandoned()
        self.end(sending)

    @precondition(lambda self: self.members.sending is None and len(self.members.current) > 1)
    @rule(data=st.data())
    def set_aside(self, data: st.DataObject) -> None:
        if self.members.aside is None:
            self.members.set_aside(data.draw(st.sampled_from(self.members.current)))

    @rule()
    def bring_back(self) -> None:
        self.members.bring_back()

    @precondition(lambda self: self.members.sending is None and self.members.current)
    @rule()
    def renumber(self) -> None:
        if self.members.current == self.members.taking_part:
            self.newest += 1
            self.members.renumbered(self.newest)
            self.has |= dict.fromkeys(self.members.taking_part, self.newest)

    @rule()
    def resume(self) -> None:
        self.members.new_incarnation()
        self.has = dict.fromkeys(self.has, -1)
        self.newest, self.is_loading = -1, False

    def end(self, sending: Sending) -> None:
        if self.is_loading:
            self.has |= {name: -1 for name in sending.names if name in self.has}
        self.is_loading = False

    @invariant()
    def serves_what_was_sent(self) -> None:
        newest = {name for name, own in self.has.items() if own == self.newest >= 0}
        assert set(self.members.current) == newest - {self.members.aside}
        assert self.members.served_version == (self.newest if newest else -1)


def test_invariant_when_anything_happens_in_any_order_holds() -> None:
    run_state_machine_as_test(
        Anything,
        settings=settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True),
    )
