"""Groups that share devices: one computes at a time, and what the one before it held is moved first."""

import asyncio
import contextvars
from itertools import pairwise

import pytest

from asyppo_async.config.placement import Moves
from asyppo_async.errors import WorkerError
from asyppo_async.trainer.worker.codec import Message
from asyppo_async.trainer.worker.control import MoveToDevice, MoveToHost
from asyppo_async.trainer.worker.turns import Turns


class Group:
    """Says what it was told, and fails if it is told to while another group has the device."""

    def __init__(self, label: str, said: list[str]) -> None:
        self.label = label
        self.said = said
        self.on_device = True
        self.fails = False

    async def tell_all(self, request: Message, deadline_s: float) -> None:
        await asyncio.sleep(0)
        if self.fails:
            raise WorkerError(f"{self.label} is gone")
        if isinstance(request, MoveToHost):
            self.said.append(f"{self.label} out{' with weights' if request.weights else ''}")
            self.on_device = False
        else:
            assert isinstance(request, MoveToDevice)
            self.said.append(f"{self.label} in")
            self.on_device = True

    async def compute(self, turns: Turns, others: list["Group"]) -> None:
        async with turns.take(self):
            for _ in range(3):
                assert self.on_device
                assert not any(other.on_device for other in others)
                await asyncio.sleep(0)
            self.said.append(f"{self.label} computes")


async def test_groups_when_asked_at_once_compute_one_after_the_other_with_the_device_to_themselves() -> None:
    said: list[str] = []
    turns = Turns("optimizer", 5)
    groups: list[Group] = []
    for label in (
        "actor",
        "critic 0",
        "critic 1",
    ):  # each loads in its turn, so the next one is not there yet
        groups.append(Group(label, said))
        await groups[-1].compute(turns, groups[:-1])
    async with asyncio.TaskGroup() as tasks:
        for _ in range(3):
            for group in groups:
                tasks.create_task(group.compute(turns, [other for other in groups if other is not group]))
    assert len(turns.last) == 12
    assert all(one.end_s <= other.moved_s for one, other in pairwise(turns.last))


@pytest.mark.parametrize(
    ("moves", "expected"),
    [
        ("none", ["a computes", "a computes", "b computes", "a computes"]),
        ("optimizer", ["a computes", "a computes", "a out", "b computes", "b out", "a in", "a computes"]),
        (
            "all",
            [
                "a computes",
                "a computes",
                "a out with weights",
                "b computes",
                "b out with weights",
                "a in",
                "a computes",
            ],
        ),
    ],
)
async def test_group_when_asked_twice_in_a_row_moves_nothing_between(
    moves: Moves, expected: list[str]
) -> None:
    said: list[str] = []
    turns, one, other = Turns(moves, 5), Group("a", said), Group("b", said)
    for group in (one, one, other, one):
        await group.compute(turns, [])
    assert said == expected


async def test_turn_when_the_group_before_it_is_gone_says_so_and_is_free_for_the_next_one() -> None:
    said: list[str] = []
    turns, one, other = Turns("optimizer", 5), Group("a", said), Group("b", said)
    await one.compute(turns, [])
    one.fails = True
    with pytest.raises(WorkerError, match="a is gone"):
        await other.compute(turns, [])
    await other.compute(turns, [])
    assert said == ["a computes", "b computes"]


async def test_group_when_it_is_in_its_turn_may_be_asked_again_and_the_others_still_wait() -> None:
    said: list[str] = []
    turns, one, other = Turns("none", 5), Group("a", said), Group("b", said)
    async with turns.take(one):
        waiting = asyncio.create_task(other.compute(turns, []), context=contextvars.Context())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(one.compute(turns, []))
        await one.compute(turns, [])
        assert said == ["a computes", "a computes"]
    await waiting
    assert said[-1] == "b computes"
