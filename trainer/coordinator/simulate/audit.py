"""The design's invariants over a whole simulated run, from what the world saw."""

from collections import Counter

from asyppo_async.trainer.coordinator.simulate.outcome import Outcome


def audit(outcome: Outcome) -> None:
    """Raises `AssertionError` with the seed and the sentence that does not hold."""
    _audit_versions(outcome)
    _audit_staleness(outcome)
    _audit_starvation(outcome)
    audit_accounts(outcome)


def audit_accounts(outcome: Outcome) -> None:
    """Invariant 3 alone, which holds whatever the rules are about staleness."""
    _audit_candidates(outcome)
    _audit_fates(outcome)
    _audit_tokens(outcome)


def _audit_versions(outcome: Outcome) -> None:
    steps = [step.step for step in outcome.steps]
    _require(outcome, steps == list(range(len(steps))), f"every version is made once, in order: {steps}")
    num_steps = outcome.scenario.settings.num_steps
    _require(
        outcome, num_steps is None or len(steps) == num_steps, f"{len(steps)} of {num_steps} steps are made"
    )
    twice = [made for made, count in Counter(outcome.publications).items() if count > 1]
    _require(outcome, not twice, f"no (incarnation, version) is made twice: {twice}")


def _audit_staleness(outcome: Outcome) -> None:
    """Invariant 2, where the gradient is computed."""
    settings = outcome.scenario.settings
    for step in outcome.steps:
        oldest_trainable = step.step - settings.max_staleness
        if settings.on_stale != "mask":
            _require(
                outcome,
                step.staleness <= settings.max_staleness,
                f"step {step.step} trains nothing older than {settings.max_staleness} versions: {step.staleness}",
            )
        fresh = sum(
            number
            for group in step.groups
            for version, number in group.versions.items()
            if version >= oldest_trainable
        )
        _require(
            outcome, step.num_trained_tokens <= fresh, f"step {step.step} gives no weight to a stale token"
        )
        newest = max(max(group.versions) for group in step.groups)
        _require(outcome, newest <= step.step, f"staleness is never negative: {newest} at step {step.step}")
        _require(
            outcome,
            len(step.groups) == settings.batch_size or step is outcome.steps[-1],
            f"step {step.step} has {len(step.groups)} groups of {settings.batch_size}",
        )


def _audit_starvation(outcome: Outcome) -> None:
    """Under `wait` nobody is passed over until it is too late: every draw is trained, or has failed by itself."""
    settings = outcome.scenario.settings
    if settings.on_stale != "wait" or settings.num_steps is None:
        return
    passed_over = {
        fate.draw.draw_id
        for fate in outcome.fates
        if fate.outcome in ("dropped", "returned") and fate.reason in ("stale", "run_ended")
    }
    _require(outcome, not passed_over, f"no draw is given up for its age: {sorted(passed_over)}")


def _audit_candidates(outcome: Outcome) -> None:
    """Every candidate is listed once, as the next draw or as skipped."""
    listed, counts = outcome.considered, outcome.counts
    assert counts is not None
    numbers = [entry.candidate.number for entry in listed]
    _require(
        outcome,
        numbers == list(range(counts.considered)),
        f"every candidate is listed once and in order: {counts.considered} were considered, {len(numbers)} listed",
    )
    accepted = [entry for entry in listed if entry.draw_id is not None]
    _require(
        outcome,
        [entry.draw_id for entry in accepted] == list(range(counts.issued)),
        f"a candidate that is not skipped is a draw: {len(accepted)} accepted, {counts.issued} issued",
    )
    _require(
        outcome,
        all(entry.candidate.accepted == (entry.draw_id is not None) for entry in listed),
        "the sampler decides which candidates are skipped",
    )


def _audit_fates(outcome: Outcome) -> None:
    """Invariant 3: each draw ends once, each attempt ends once, and nothing is lost."""
    counts = outcome.counts
    _require(outcome, counts is not None, "the run has ended")
    assert counts is not None
    ends = Counter(fate.draw.draw_id for fate in outcome.fates if fate.outcome != "returned")
    _require(
        outcome,
        set(ends) == set(range(counts.issued)) and set(ends.values()) <= {1},
        f"every issued draw has exactly one fate: {counts.issued} issued, {len(ends)} ended",
    )
    attempts = Counter((fate.draw.draw_id, fate.draw.attempt) for fate in outcome.fates)
    again = [
        attempt
        for attempt, count in attempts.items()
        if count > 1 and not any(_ended_while_returned(outcome, *attempt))
    ]
    _require(outcome, not again, f"every attempt has exactly one fate: {again}")
    impossible = {"older_than_admission", "rolled_back"} & {fate.reason for fate in outcome.fates}
    _require(
        outcome, not impossible, f"groups are admitted at a version that their servers have: {impossible}"
    )
    trained = sorted(fate.draw.draw_id for fate in outcome.fates if fate.outcome == "trained")
    in_steps = sorted(group.draw.draw_id for step in outcome.steps for group in step.groups)
    _require(outcome, trained == in_steps, "a draw is trained in exactly one step")


def _ended_while_returned(outcome: Outcome, draw_id: int, attempt: int) -> list[bool]:
    """The run ended between two attempts: the draw is then dropped under the number of the one that was lost."""
    return [
        fate.reason == "run_ended"
        for fate in outcome.fates
        if (fate.draw.draw_id, fate.draw.attempt) == (draw_id, attempt)
    ]


def _audit_tokens(outcome: Outcome) -> None:
    tokens = outcome.tokens
    assert tokens is not None
    total = tokens.trained + tokens.stale + tokens.rejected + tokens.filtered
    total += sum(tokens.dropped_by_reason.values())
    _require(
        outcome,
        tokens.generated == total and tokens.in_flight == tokens.queued == 0,
        f"tokens generated = trained + stale + rejected + filtered + dropped: {tokens}",
    )
    if outcome.num_resumes == 0:
        _require(
            outcome,
            tokens.generated == outcome.num_tokens,
            f"the ledger counts what the servers generated: {tokens.generated} against {outcome.num_tokens}",
        )


def _require(outcome: Outcome, holds: bool, sentence: str) -> None:
    if not holds:
        raise AssertionError(f"seed {outcome.scenario.seed}: {sentence}")
