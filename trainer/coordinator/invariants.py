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
    assert served_version <= version, f"no version is served before it is made: {served_version} > {version}"
    most = settings.max_concurrent_groups
    assert ledger.num_in_flight <= most, f"at most {most} groups are in flight, got {ledger.num_in_flight}"
    steps = list(chosen)
    assert steps == list(range(version, version + len(steps))) and len(steps) <= 2, (
        f"only the present step and the one ahead have a batch: got {steps} at version {version}"
    )
    for step, batch in chosen.items():
        assert [record.draw for record in ledger.chosen[step]] == [draw.draw for draw in batch.draws], (
            f"the batch of step {step} is what the ledger holds for it"
        )
        worst = max(draw.staleness for draw in batch.draws)
        assert settings.on_stale == "mask" or worst <= settings.max_staleness, (
            f"no group of step {step} is older than {settings.max_staleness} versions, got {worst}"
        )
    if settings.on_stale == "wait":
        _check_deadlines(ledger, settings, next_step=version + len(chosen))


def _check_ledger(ledger: Ledger) -> None:
    counts = ledger.counts()
    states = Counter(record.state for record in ledger.live.values())
    assert (states["in_flight"], states["queued"] + states["chosen"], states["returned"]) == (
        counts.in_flight,
        counts.queued,
        counts.returned,
    ), f"the counts of the ledger are those of its records: {counts} against {dict(states)}"
    assert sum(map(len, ledger.in_flight.values())) == counts.in_flight, "draws in flight are in one place"
    assert sum(map(len, ledger.queued.values())) == ledger.num_queued, "queued draws are in one place"
    ended = counts.trained + counts.filtered + counts.dropped
    assert counts.issued == ended + counts.returned + counts.queued + counts.in_flight, (
        f"issued = trained + filtered + dropped + returned + queued + in flight: {counts}"
    )


def _check_tokens(ledger: Ledger) -> None:
    tokens = ledger.token_counts()
    used = tokens.trained + tokens.stale + tokens.rejected + tokens.filtered
    used += sum(tokens.dropped_by_reason.values())
    assert tokens.generated == used + tokens.in_flight + tokens.queued, (
        f"tokens generated = in flight + queued + trained + stale + rejected + filtered + dropped: {tokens}"
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
