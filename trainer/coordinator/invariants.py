"""The sentences that hold after every transition of the decision core."""

from collections import Counter
from collections.abc import Mapping

from asyppo_async.trainer.coordinator.decisions import DecisionSettings
from asyppo_async.trainer.coordinator.ledger import Ledger
from asyppo_async.trainer.coordinator.order import Chosen


def check_core(
    ledger: Ledger,
    settings: DecisionSettings,
    *,
    version: int,
    served_version: int,
    chosen: Mapping[int, Chosen],
) -> None:
    """Raises `AssertionError` with the first sentence that does not hold."""
    _check_ledger(ledger)
    _check_tokens(ledger)
    _require(
        served_version <= version, f"no version is served before it is trained: {served_version} > {version}"
    )
    _require(
        ledger.num_in_flight <= settings.max_concurrent_groups,
        f"at most {settings.max_concurrent_groups} groups are in flight, got {ledger.num_in_flight}",
    )
    _require(
        list(chosen) == list(range(version, version + len(chosen))) and len(chosen) <= 2,
        f"only the present step and the one ahead have a batch: got {list(chosen)} at version {version}",
    )
    for step, batch in chosen.items():
        _require(
            [record.draw_id for record in ledger.chosen[step]] == [draw.draw.draw_id for draw in batch.draws],
            f"the batch of step {step} is what the ledger holds for it",
        )
        if settings.on_stale != "mask":
            _require(
                all(draw.staleness <= settings.max_staleness for draw in batch.draws),
                f"no group of step {step} is older than {settings.max_staleness} versions",
            )
    if settings.on_stale == "wait":
        _check_deadlines(ledger, settings, next_step=version + len(chosen))


def _check_ledger(ledger: Ledger) -> None:
    counts = ledger.counts()
    states = Counter(record.state for record in ledger.live.values())
    _require(
        (states["in_flight"], states["queued"] + states["chosen"], states["returned"])
        == (counts.in_flight, counts.queued, counts.returned),
        f"the counts of the ledger are those of its records: {counts} against {dict(states)}",
    )
    _require(
        sum(len(records) for records in ledger.in_flight.values()) == counts.in_flight
        and sum(len(records) for records in ledger.queued.values()) == ledger.num_queued,
        f"every live draw is in the one place that its state names: {counts}",
    )
    ended = counts.trained + counts.filtered + counts.dropped
    _require(
        counts.issued == ended + counts.returned + counts.queued + counts.in_flight,
        f"issued = trained + filtered + dropped + returned + queued + in flight: {counts}",
    )


def _check_tokens(ledger: Ledger) -> None:
    tokens = ledger.token_counts()
    used = tokens.trained + tokens.stale + tokens.rejected + tokens.filtered
    _require(
        tokens.generated == used + tokens.in_flight + tokens.queued + sum(tokens.dropped_by_reason.values()),
        f"tokens generated = in flight + queued + trained + stale + rejected + filtered + dropped: {tokens}",
    )


def _check_deadlines(ledger: Ledger, settings: DecisionSettings, *, next_step: int) -> None:
    outstanding = 0
    for version in sorted({*ledger.queued, *ledger.in_flight}):
        outstanding += len(ledger.queued.get(version, ())) + len(ledger.in_flight.get(version, ()))
        due_step = version + settings.max_staleness
        most = settings.batch_size * max(0, due_step + 1 - next_step)
        _require(
            outstanding <= most,
            f"groups due by step {due_step} fit into the steps until then: {outstanding} > {most} before step "
            f"{next_step}",
        )


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise AssertionError(sentence)
