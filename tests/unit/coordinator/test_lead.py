"""`lead = auto`, batch by batch: B = 16, eta = 3, one batch every 100 s."""

from dataclasses import replace

from asyppo_async.trainer.coordinator.decisions import DecisionSettings
from asyppo_async.trainer.coordinator.lead import LeadController

SETTINGS = DecisionSettings(
    batch_size=16,
    group_size=4,
    num_critics=2,
    max_staleness=3,
    on_stale="wait",
    lead="auto",
    max_attempts=1,
    max_concurrent_groups=100,
    max_replacements_per_step=100,
    num_steps=None,
)
NUM_CALM = 8
"""2 * (eta + 1) batches without a wait, after which the lead may shrink."""


class Batches:
    """Chooses a batch every 100 s, after a wait at its end."""

    def __init__(self, controller: LeadController) -> None:
        self.controller = controller
        self.now_s = 0.0
        controller.chosen(num_surplus=0, now_s=0.0)

    def choose(self, *, num_surplus: int = 0, short_s: float = 0.0, due_s: float = 0.0) -> float:
        self.now_s += 100.0
        if short_s:
            self.controller.waiting(shortage=True, now_s=self.now_s - short_s - due_s)
        if due_s:
            self.controller.waiting(shortage=False, now_s=self.now_s - due_s)
        return self.controller.chosen(num_surplus=num_surplus, now_s=self.now_s)


def test_lead_when_groups_are_missing_grows_with_the_wait_up_to_the_bound() -> None:
    controller = LeadController(SETTINGS)
    batches = Batches(controller)
    assert controller.limit == 32
    assert batches.choose(short_s=5.0) == 5.0
    assert controller.limit == 32 + 7  # 16 * 8 * 0.05, rounded up
    batches.choose(short_s=0.5)
    assert controller.limit == 39
    for _ in range(5):
        batches.choose(short_s=50.0)
    assert controller.limit == 64


def test_lead_when_a_due_group_is_waited_for_does_not_grow() -> None:
    controller = LeadController(SETTINGS)
    batches = Batches(controller)
    assert batches.choose(due_s=40.0) == 40.0
    assert batches.choose(short_s=0.5, due_s=40.0) == 40.5
    assert controller.limit == 32


def test_lead_when_groups_are_left_over_shrinks_by_half_of_the_least_surplus_beyond_a_margin() -> None:
    controller = LeadController(SETTINGS)
    batches = Batches(controller)
    batches.choose(num_surplus=12)
    for _ in range(NUM_CALM - 2):
        batches.choose(num_surplus=30)
    assert controller.limit == 32
    batches.choose(num_surplus=30)
    assert controller.limit == 32 - 5  # (12 - 16 / 8) / 2
    for _ in range(10 * NUM_CALM):
        batches.choose(num_surplus=60)
    assert controller.limit == 16


def test_lead_when_a_due_group_was_waited_for_takes_what_piled_up_for_no_surplus() -> None:
    controller = LeadController(SETTINGS)
    batches = Batches(controller)
    for _ in range(NUM_CALM - 1):
        batches.choose(num_surplus=30)
    batches.choose(num_surplus=30, due_s=40.0)
    assert controller.limit == 32
    for _ in range(NUM_CALM - 1):
        batches.choose(num_surplus=30)
    assert controller.limit == 32


def test_lead_when_saturated_is_the_bound_whatever_is_left_over() -> None:
    controller = LeadController(replace(SETTINGS, lead="saturated"))
    batches = Batches(controller)
    for _ in range(2 * NUM_CALM):
        batches.choose(num_surplus=60)
    controller.restore(20)
    assert controller.limit == 64


def test_lead_when_restored_stays_within_the_bounds_of_today() -> None:
    controller = LeadController(SETTINGS)
    for saved, limit in ((20, 20), (3, 16), (500, 64)):
        controller.restore(saved)
        assert controller.limit == limit
