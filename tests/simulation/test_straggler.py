"""One straggler of 25 ticks among groups of one tick, eta = 2, B = 4, 40 steps of one tick each.

Numbers of the rules that are not ours: `algorithms.md` section 8 (admission gate alone, four ways to consume).
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

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


def run_ours(on_stale: OnStale) -> tuple[DecisionCore, int]:
    """(core after the run, ticks) in the same world; only the first attempt of draw 0 is slow."""
    settings = DecisionSettings(
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
    ("rule", "worst", "ticks"),
    [(in_finish_order, 25, 40), (oldest_finished_first, 24, 40), (oldest_of_all, 2, 64)],
)
def test_staleness_when_only_admission_is_gated_is_what_was_published(
    rule: Rule, worst: int, ticks: int
) -> None:
    assert run_naive(rule) == (worst, ticks)


def test_straggler_when_dropped_costs_one_group_and_no_time() -> None:
    core, ticks = run_ours("drop")
    assert core.max_staleness_seen <= MAX_STALENESS
    assert ticks == 40
    assert dict(core.counts().returned_by_reason) == {"stale": 1}
    assert core.token_counts().dropped_by_reason == {"stale": 1}


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
