"""Admission: which draws may be started now."""

from asyppo_async.errors import TaskError
from asyppo_async.trainer.coordinator.decisions import DecisionSettings
from asyppo_async.trainer.coordinator.draws import Draw
from asyppo_async.trainer.coordinator.ledger import Ledger
from asyppo_async.trainer.coordinator.retry import Retry
from asyppo_async.trainer.coordinator.sampler import Candidate, Sampler
from asyppo_async.trainer.coordinator.staleness import token_bound

_FEWEST_SKIPS = 1000
_MANY_PROMPTS = 10_000
"""A sampler may skip ten times as many candidates in a row as it has prompts, this many at most: they are all listed,
and the smallest probability of acceptance that a method has is 0.01."""


def room_within(
    most_outstanding: int,
    *,
    served_version: int,
    num_steps_chosen: int,
    num_outstanding: int,
    batch_size: int,
) -> int:
    """How many groups may be started at served version `v` (may be negative).

    For `most_outstanding = (eta + 1) * B` this is the bound's `(eta + v + 1) * B - held`, with `held` the groups
    outstanding and those of chosen steps. A chosen step is charged whole even if its batch was short, for the steps
    that are left are what the groups still outstanding have to fit into. Before anything is served (`v = -1`)
    nothing is started.
    """
    if served_version < 0:
        return 0
    return most_outstanding - (num_steps_chosen - served_version) * batch_size - num_outstanding


class Admission:
    """Starts draws on the served version.

    Invariant: at served version `v` at most `(eta + v + 1) * B` groups hold a slot: those of chosen steps, queued
    and in flight. All numbers derive from the ledger.
    """

    def __init__(self, *, settings: DecisionSettings, ledger: Ledger, sampler: Sampler, retry: Retry) -> None:
        self._settings = settings
        self._retry = retry
        self._ledger = ledger
        self._sampler = sampler

    def start(
        self, *, served_version: int, num_steps_chosen: int, lead_limit: int, now_s: float
    ) -> list[Draw]:
        """Every draw that there is room for, those that were given back first.

        Raises:
            TaskError: a selecting sampler accepted none of very many candidates.
        """
        draws: list[Draw] = []
        room = self._room(served_version, num_steps_chosen, lead_limit)
        while len(draws) < room:
            if self._ledger.returned:
                draws.append(self._ledger.reissue(version=served_version, now_s=now_s))
                continue
            candidate = self._next_accepted(served_version, now_s)
            if candidate is None:
                break
            draws.append(self._ledger.issue(candidate, version=served_version, now_s=now_s))
        return draws

    def _room(self, served_version: int, num_steps_chosen: int, lead_limit: int) -> int:
        """The least of bound, lead, concurrency and what the run still needs."""
        settings, ledger = self._settings, self._ledger
        if self._retry.exhausted:
            return 0
        on_time = ledger.num_outstanding - self._num_overdue(num_steps_chosen)
        bound, lead = (
            room_within(
                most,
                served_version=served_version,
                num_steps_chosen=num_steps_chosen,
                num_outstanding=num_outstanding,
                batch_size=settings.batch_size,
            )
            for most, num_outstanding in (
                ((settings.max_staleness + 1) * settings.batch_size, ledger.num_outstanding),
                (lead_limit, on_time),
            )
        )
        rooms = [bound, lead, settings.max_concurrent_groups - ledger.num_in_flight]
        if settings.num_steps is not None:
            rooms.append((settings.num_steps - num_steps_chosen) * settings.batch_size - on_time)
        return max(0, min(rooms))

    def _num_overdue(self, num_steps_chosen: int) -> int:
        """Unfinished groups past their due step (under `wait` there are none): no batch counts on them."""
        if self._settings.on_stale == "wait":
            return 0
        oldest = token_bound(step=num_steps_chosen, max_staleness=self._settings.max_staleness)
        return sum(len(records) for version, records in self._ledger.in_flight.items() if version < oldest)

    def _next_accepted(self, served_version: int, now_s: float) -> Candidate | None:
        """The next candidate that the sampler accepts; those that it skips are listed. None: it is exhausted."""
        most_skips = _FEWEST_SKIPS + 10 * min(self._sampler.num_prompts, _MANY_PROMPTS)
        num_skips = 0
        while not self._sampler.exhausted:
            candidate = self._sampler.next_candidate()
            if candidate.accepted:
                return candidate
            self._ledger.skip(candidate, version=served_version, now_s=now_s)
            num_skips += 1
            if num_skips > most_skips:
                raise TaskError(f"the sampler skipped {num_skips} candidates in a row; lower its selectivity")
        return None
