"""The order rule against a search over all batches, and the admission gate against published numbers."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from asyppo_async.trainer.coordinator.admission import room_within
from asyppo_async.trainer.coordinator.draws import DrawRecord
from asyppo_async.trainer.coordinator.order import Waiting, batch_of, chosen_draw, first_overtaken
from asyppo_async.trainer.coordinator.staleness import min_members


def record(draw_id: int, version: int, finish_order: int = -1) -> DrawRecord:
    return DrawRecord(
        draw_id=draw_id,
        prompt_id=f"p{draw_id}",
        epoch=0,
        state="in_flight" if finish_order < 0 else "queued",
        attempt=0,
        num_failures=0,
        admission_version=version,
        admitted_s=0.0,
        finish_order=finish_order,
        oldest_version=version,
        newest_version=version,
    )


def by_version(records: list[DrawRecord]) -> dict[int, dict[int, DrawRecord]]:
    grouped: dict[int, dict[int, DrawRecord]] = {}
    for one in records:
        grouped.setdefault(one.admission_version, {})[one.draw_id] = one
    return grouped


def keeps_rule(left: list[int], *, step: int, batch_size: int, max_staleness: int) -> bool:
    """The sentence of `design.md` section 5, over the versions of the groups that are left."""
    return all(
        sum(version + max_staleness <= due for version in left) <= batch_size * (due - step)
        for due in range(step, step + 50)
    )


@hypothesis_settings(max_examples=400, deadline=None, derandomize=True)
@given(
    queued=st.lists(st.integers(0, 4), min_size=2, max_size=7),
    in_flight=st.lists(st.integers(0, 4), max_size=4),
    batch_size=st.integers(1, 2),
    max_staleness=st.integers(0, 3),
    step=st.integers(0, 5),
)
def test_overtaking_when_searched_over_all_batches_is_allowed_exactly_if_one_keeps_the_rule(
    queued: list[int], in_flight: list[int], batch_size: int, max_staleness: int, step: int
) -> None:
    records = [record(index, version, finish_order=index) for index, version in enumerate(queued)]
    flying = [record(100 + index, version) for index, version in enumerate(in_flight)]
    overtaken = first_overtaken(
        by_version(records),
        by_version(flying),
        step=step,
        batch_size=batch_size,
        num_chosen=batch_size,
        max_staleness=max_staleness,
    )
    some_batch_keeps_it = any(
        keeps_rule(
            [version for index, version in enumerate(queued) if index not in taken] + in_flight,
            step=step,
            batch_size=batch_size,
            max_staleness=max_staleness,
        )
        for taken in combinations(range(len(queued)), batch_size)
    )
    assert (overtaken is None) == some_batch_keeps_it


def test_overtaken_when_a_group_is_due_names_the_unfinished_ones_up_to_it() -> None:
    queued = by_version([record(5, 1, 0), record(6, 1, 1)])
    in_flight = by_version([record(1, 0), record(7, 1)])
    overtaken = first_overtaken(queued, in_flight, step=2, batch_size=2, num_chosen=2, max_staleness=2)
    assert overtaken is not None
    assert overtaken.due_step == 2
    assert [one.draw_id for one in overtaken.records] == [1]


def test_batch_when_chosen_is_oldest_version_first_in_finishing_order_within_one() -> None:
    queued = by_version([record(9, 1, 0), record(3, 0, 1), record(1, 0, 2), record(8, 1, 3)])
    assert [one.draw_id for one in batch_of(queued, num_chosen=3)] == [3, 1, 9]


def test_staleness_when_split_is_time_in_flight_and_time_in_the_queue() -> None:
    one = record(1, 3, 0)
    one.finished_at_version, one.finished_s, one.oldest_version = 5, 20.0, 4
    chosen = chosen_draw(one, step=7, now_s=32.0)
    assert (chosen.staleness, chosen.staleness_in_flight, chosen.staleness_in_queue) == (3, 1, 2)
    assert (chosen.in_flight_s, chosen.in_queue_s) == (20.0, 12.0)


def test_waiting_when_printed_says_for_what() -> None:
    short = Waiting(step=3, num_ready=2, num_wanted=4, due=(), waited_s=0.0)
    assert str(short) == "step 3 waits for finished groups: 2 of 4 are there"
    due = tuple(record(index, 1).draw for index in range(6))
    assert str(Waiting(step=3, num_ready=4, num_wanted=4, due=due, waited_s=0.0)) == (
        "step 3 waits for groups that are due: 0 (version 1), 1 (version 1), 2 (version 1), 3 (version 1) and 2 more"
    )


@pytest.mark.parametrize(
    ("max_staleness", "version", "outstanding", "room"),
    [(0, 0, 0, 8), (0, 0, 8, 0), (1, 0, 8, 8), (1, 3, 8, 8), (0, 0, 12, -4)],
)
def test_room_when_gated_is_that_of_the_published_rule(
    max_staleness: int, version: int, outstanding: int, room: int
) -> None:
    """`algorithms.md` section 8, B = 8: (eta + v + 1) B - (accepted + running); accepted 28 = 24 trained + 4."""
    assert (
        room_within(
            (max_staleness + 1) * 8,
            served_version=version,
            num_steps_chosen=version,
            num_outstanding=outstanding,
            batch_size=8,
        )
        == room
    )


def test_room_when_the_new_version_is_not_served_yet_is_that_of_the_old_one() -> None:
    common = {"num_steps_chosen": 4, "num_outstanding": 8, "batch_size": 8}
    assert room_within(16, served_version=3, **common) == 0
    assert room_within(16, served_version=4, **common) == 8
    assert room_within(16, served_version=-1, num_steps_chosen=0, num_outstanding=0, batch_size=8) == 0


@pytest.mark.parametrize(
    ("group_size", "num_critics", "least"),
    [(1, 2, 1), (2, 1, 2), (4, 2, 2), (8, 2, 4), (9, 2, 5), (4, 3, 3), (32, 0, 16)],
)
def test_group_when_members_are_lost_needs_two_one_per_critic_and_half(
    group_size: int, num_critics: int, least: int
) -> None:
    assert min_members(group_size=group_size, num_critics=num_critics) == least
