"""One straggler of 25 ticks among groups of one tick, eta = 2, B = 4, 40 steps of one tick each.

Numbers of the rules that are not ours: `algorithms.md` section 8 (admission gate alone, four ways to consume).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from asyppo_async.trainer.coordinator.admission import room_within
from asyppo_async.trainer.coordinator.core import DecisionCore
from asyppo_async.trainer.coordinator.decisions import DecisionSettings, OnStale
from asyppo_async.trainer.coordinator.draws import Draw, TokenUse
from asyppo_async.trainer.coordinator.order import Chosen
from asyppo_async.trainer.coordinator.sampler import EpochSampler

BATCH_SIZE = 4
MAX_STALENESS = 2
NUM_STEPS = 40
STRAGGLER_TICKS = 25


@dataclass(frozen=True, order=True)
class Finished:
    """A group of the naive loop."""

    version: int
    number: int


Rule = Callable[[list[Finished], list[Finished]], list[Finished]]


def in_finish_order(queue: list[Finished], in_flight: list[Finished]) -> list[Finished]:
    return queue


def oldest_finished_first(queue: list[Finished], in_flight: list[Finished]) -> list[Finished]:
    return sorted(queue)


def oldest_of_all(queue: list[Finished], in_flight: list[Finished]) -> list[Finished]:
    oldest = sorted([*queue, *in_flight])[:BATCH_SIZE]
    return oldest if all(group in queue for group in oldest) else []


def run_naive(rule: Rule) -> tuple[int, int]:
    """(worst staleness, ticks) under the admission gate and one way to consume."""
    version = tick = worst = 0
    queue: list[Finished] = []
    in_flight: dict[Finished, int] = {}
    num_admitted = 0
    while version < NUM_STEPS:
        while num_admitted < (MAX_STALENESS + version + 1) * BATCH_SIZE:
            ticks = STRAGGLER_TICKS if num_admitted == 0 else 1
            in_flight[Finished(version, num_admitted)] = tick + ticks
            num_admitted += 1
        tick += 1
        queue += [group for group, at in in_flight.items() if at <= tick]
        in_flight = {group: at for group, at in in_flight.items() if at > tick}
        batch = rule(queue, list(in_flight))[:BATCH_SIZE]
        if len(batch) == BATCH_SIZE:
            queue = [group for group in queue if group not in batch]
            worst = max(worst, *(version - group.version for group in batch))
            version += 1
    return worst, tick


def settings_of(on_stale: OnStale) -> DecisionSettings:
    return DecisionSettings(
        batch_size=BATCH_SIZE,
        group_size=1,
        num_critics=0,
        max_staleness=MAX_STALENESS,
        on_stale=on_stale,
        lead="saturated",
        max_attempts=3,
        max_concurrent_groups=1000,
        max_replacements_per_step=100,
        num_steps=NUM_STEPS,
    )


def run_ours(on_stale: OnStale) -> tuple[DecisionCore, int]:
    """(core after the run, ticks) in the same world; only the first attempt of draw 0 is slow."""
    settings = settings_of(on_stale)
    sampler = EpochSampler(prompt_ids=[f"p{index}" for index in range(1000)], seed=0, num_epochs=None)
    core = DecisionCore(settings=settings, sampler=sampler, debug=True)
    core.served(0)
    tick = 0
    in_flight: dict[Draw, int] = {}
    while not core.finished:
        for draw in core.admit(tick):
            is_straggler = (draw.draw_id, draw.attempt) == (0, 0)
            in_flight[draw] = tick + (STRAGGLER_TICKS if is_straggler else 1)
        tick += 1
        for draw in [draw for draw, at in in_flight.items() if at <= tick]:
            del in_flight[draw]
            version = draw.admission_version
            core.finish(
                draw, num_members=1, num_tokens=1, oldest_version=version, newest_version=version, now_s=tick
            )
        batch = core.choose_batch(tick)
        if isinstance(batch, Chosen):
            core.begin_step(tick)
            stale = sum(draw.oldest_version < batch.token_bound for draw in batch.draws)
            core.end_step(tick, TokenUse(trained=BATCH_SIZE - stale, stale=stale, rejected=0))
            core.served(core.version)
    return core, tick


@pytest.mark.parametrize(
    ("rule", "key"),
    [
        (in_finish_order, "straggler_eta2_finish"),
        (oldest_finished_first, "straggler_eta2_sorted_finished"),
        (oldest_of_all, "straggler_eta2_start"),
    ],
)
def test_staleness_when_only_admission_is_gated_is_what_was_published(
    rule: Rule, key: str, golden: dict[str, Any]
) -> None:
    assert run_naive(rule) == (golden[key]["max_staleness"], golden[key]["ticks"])
    assert golden[key]["dropped"] == 0


CAPACITIES = {
    # eta, version, groups accepted, groups running
    "eta0 v0 B8 acc0 run0": (0, 0, 0, 0),
    "eta0 v0 B8 run8": (0, 0, 0, 8),
    "eta1 v0 B8 run8": (1, 0, 0, 8),
    "eta1 v3 B8 acc28 run4": (1, 3, 28, 4),
    "conc-bound": (8, 3, 28, 60),
}


def test_room_when_groups_are_accepted_and_running_is_the_published_capacity(golden: dict[str, Any]) -> None:
    assert set(golden["capacity"]) == set(CAPACITIES)
    for name, (eta, version, accepted, running) in CAPACITIES.items():
        room = room_within(
            (eta + 1) * 8,
            served_version=version,
            num_steps_chosen=version,
            num_outstanding=accepted - version * 8 + running,
            batch_size=8,
        )
        bounded_by_concurrency = name == "conc-bound"
        assert (room > golden["capacity"][name]) == bounded_by_concurrency
        assert min(room, 64 - running) == golden["capacity"][name]


def test_admission_when_the_fleet_is_nearly_full_starts_what_it_has_slots_for(
    golden: dict[str, Any],
) -> None:
    """Version 3, eta 8: 24 groups trained, 4 queued and 60 of 64 slots taken."""
    core = DecisionCore(
        settings=replace(settings_of("wait"), batch_size=8, max_staleness=8, max_concurrent_groups=64),
        sampler=EpochSampler(prompt_ids=[f"p{index}" for index in range(1000)], seed=0, num_epochs=None),
        debug=True,
    )
    core.served(0)
    running: list[Draw] = []
    for version in range(4):
        running += core.admit(0)
        for draw in running[: 8 if version < 3 else 4]:
            core.finish(
                draw,
                num_members=1,
                num_tokens=1,
                oldest_version=draw.admission_version,
                newest_version=draw.admission_version,
                now_s=0,
            )
        running = running[8 if version < 3 else 4 :]
        if version < 3:
            assert isinstance(core.choose_batch(0), Chosen)
            core.begin_step(0)
            core.end_step(0, TokenUse(trained=8, stale=0, rejected=0))
        if version < 2:
            core.served(core.version)
    assert len(running) == 60
    core.served(3)
    assert len(core.admit(0)) == golden["capacity"]["conc-bound"]


def test_straggler_when_dropped_costs_one_group_and_no_time(golden: dict[str, Any]) -> None:
    expected = golden["straggler_eta2_drop"]
    core, ticks = run_ours("drop")
    assert core.max_staleness_seen <= expected["max_staleness"] == MAX_STALENESS
    assert ticks == expected["ticks"]
    assert dict(core.counts().returned_by_reason) == {"stale": expected["dropped"]}
    assert core.token_counts().dropped_by_reason == {"stale": expected["dropped"]}


def test_straggler_when_masked_costs_its_tokens_and_no_time() -> None:
    core, ticks = run_ours("mask")
    assert ticks == 40
    assert core.token_counts().stale == 1
    assert core.counts().trained == NUM_STEPS * BATCH_SIZE


def test_straggler_when_waited_for_costs_time_and_nothing_else() -> None:
    core, ticks = run_ours("wait")
    assert core.max_staleness_seen == MAX_STALENESS
    assert ticks == 62
    assert core.counts().trained == core.counts().issued == NUM_STEPS * BATCH_SIZE
