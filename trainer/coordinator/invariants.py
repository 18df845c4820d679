"""The sentences that hold after every transition of the decision core."""

from collections.abc import Mapping
from typing import get_args

from asyppo_async.trainer.coordinator.admission import room_within
from asyppo_async.trainer.coordinator.decisions import DecisionSettings
from asyppo_async.trainer.coordinator.draws import DrawState
from asyppo_async.trainer.coordinator.lead import LeadController
from asyppo_async.trainer.coordinator.ledger import Ledger
from asyppo_async.trainer.coordinator.order import Chosen
from asyppo_async.trainer.coordinator.retry import Retry
from asyppo_async.trainer.coordinator.sampler import Sampler


def check_core(
    ledger: Ledger,
    settings: DecisionSettings,
    *,
    version: int,
    served_version: int,
    chosen: Mapping[int, Chosen],
    sampler: Sampler,
    retry: Retry,
    lead: LeadController,
) -> None:
    """Raises `AssertionError` with the first sentence that does not hold."""
    _check_ledger(ledger)
    assert ledger.totals.considered == sampler.num_considered, (
        f"every candidate of the sampler is in the ledger: {sampler.num_considered}, {ledger.totals.considered} "
        "are listed"
    )
    _check_admission(ledger, settings, served_version=served_version, num_steps_chosen=version + len(chosen))
    retry.check()
    lead.check()
    assert served_version <= version, f"no version is served before it is made: {served_version} > {version}"
    most = settings.max_concurrent_groups
    assert ledger.num_in_flight <= most, f"at most {most} groups are in flight, got {ledger.num_in_flight}"
    steps = list(chosen)
    assert steps == list(range(version, version + len(steps))) and len(steps) <= 2, (
        f"only the present step and the one ahead have a batch: got {steps} at version {version}"
    )
    for step, batch in chosen.items():
        held = [(record.draw_id, record.attempt) for record in ledger.chosen[step]]
        assert held == [(one.draw.draw_id, one.draw.attempt) for one in batch.draws], (
            f"the batch of step {step} is what the ledger holds for it"
        )
        worst = max(draw.staleness for draw in batch.draws)
        assert settings.on_stale == "mask" or worst <= settings.max_staleness, (
            f"no group of step {step} is older than {settings.max_staleness} versions, got {worst}"
        )
    if settings.on_stale == "wait":
        _check_deadlines(ledger, settings, next_step=version + len(chosen))


def _check_ledger(ledger: Ledger) -> None:
    """From the records and the totals themselves, not from what the ledger makes of them for others."""
    totals, states, num_tokens = ledger.totals, dict.fromkeys(get_args(DrawState), 0), 0
    for record in ledger.live.values():
        states[record.state] += 1
        num_tokens += record.num_tokens
    counted = (ledger.num_in_flight, ledger.num_queued, ledger.num_chosen, len(ledger.returned))
    assert tuple(states[state] for state in ("in_flight", "queued", "chosen", "returned")) == counted, (
        f"the counts of the ledger are those of its records: {counted} against {states}"
    )
    assert sum(map(len, ledger.in_flight.values())) == ledger.num_in_flight, (
        "draws in flight are in one place"
    )
    assert sum(map(len, ledger.queued.values())) == ledger.num_queued, "queued draws are in one place"
    ended = totals.trained + sum(totals.filtered_by_reason.values()) + sum(totals.dropped_by_reason.values())
    assert totals.issued == ended + len(ledger.live), (
        f"issued = trained + filtered + dropped + returned + queued + in flight: {totals}, live {states}"
    )
    used = totals.tokens_trained + totals.tokens_stale + totals.tokens_rejected + totals.tokens_filtered
    used += sum(totals.tokens_dropped_by_reason.values())
    assert totals.tokens_generated == used + num_tokens, (
        f"tokens generated = in flight + queued + trained + stale + rejected + filtered + dropped: {totals}, "
        f"live {num_tokens}"
    )


def _check_admission(
    ledger: Ledger, settings: DecisionSettings, *, served_version: int, num_steps_chosen: int
) -> None:
    if served_version < 0:
        return
    room = room_within(
        (settings.max_staleness + 1) * settings.batch_size,
        served_version=served_version,
        num_steps_chosen=num_steps_chosen,
        num_outstanding=ledger.num_outstanding,
        batch_size=settings.batch_size,
    )
    assert room >= 0, (
        f"at served version {served_version} at most (eta + v + 1) B groups hold a slot: {-room} too many, "
        f"{ledger.num_outstanding} are outstanding and {num_steps_chosen} steps have their batch"
    )


def _check_deadlines(ledger: Ledger, settings: DecisionSettings, *, next_step: int) -> None:
    outstanding = 0
    for version in sorted({*ledger.queued, *ledger.in_flight}):
        outstanding += len(ledger.queued.get(version, ())) + len(ledger.in_flight.get(version, ()))
        due_step = version + settings.max_staleness
        most = settings.batch_size * max(0, due_step + 1 - next_step)
        assert outstanding <= most, (
            f"groups due by step {due_step} fit into the steps until then: {outstanding} > {most} before step "
            f"{next_step}"
        )
