"""Order: which finished groups make the batch of a step, and whether younger ones may overtake unfinished ones.

A group admitted at version `a` is due by step `a + max_staleness`. Invariant (policy `wait`): after the batch of
step `v` is chosen, for every `d >= v` the outstanding groups due by `d` number at most `B * (d - v)`, so that all of
them can still be on time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from statistics import fmean

from asyppo_async.trainer.coordinator.draws import Draw, DrawRecord

ByVersion = Mapping[int, Mapping[int, DrawRecord]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenDraw:
    """One group of a batch."""

    draw: Draw
    num_members: int
    num_tokens: int
    oldest_version: int
    newest_version: int
    staleness: int
    """Of its oldest token: `staleness_in_flight + staleness_in_queue`."""
    staleness_in_flight: int
    staleness_in_queue: int
    in_flight_s: float
    in_queue_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The batch of a step, oldest version first, in finishing order within one version."""

    step: int
    draws: tuple[ChosenDraw, ...]
    token_bound: int
    """Tokens of an older version are class *stale*: no weight in the policy update."""
    waited_s: float
    """From the first request for this batch until now."""

    @property
    def in_flight_s(self) -> float:
        """Mean over the groups, from admission to completion."""
        return fmean(chosen.in_flight_s for chosen in self.draws)

    @property
    def num_tokens(self) -> int:
        return sum(chosen.num_tokens for chosen in self.draws)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """No batch can be chosen yet."""

    step: int
    num_ready: int
    """Finished groups in the queue."""
    num_wanted: int
    due: tuple[Draw, ...]
    """Unfinished groups that may not be overtaken any more; empty when there are too few finished ones."""
    waited_s: float

    def __str__(self) -> str:
        if self.due:
            names = ", ".join(f"{draw.draw_id} (version {draw.admission_version})" for draw in self.due[:4])
            more = f" and {len(self.due) - 4} more" if len(self.due) > 4 else ""
            return f"step {self.step} waits for groups that are due: {names}{more}"
        return f"step {self.step} waits for finished groups: {self.num_ready} of {self.num_wanted} are there"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overtaken:
    """Unfinished groups that the batch would leave too little time."""

    due_step: int
    records: tuple[DrawRecord, ...]


def oldest_first(queued: ByVersion) -> Iterator[DrawRecord]:
    """Finished groups by admission version, in finishing order within one version."""
    for version in sorted(queued):
        yield from queued[version].values()


def first_overtaken(
    queued: ByVersion,
    in_flight: ByVersion,
    *,
    step: int,
    batch_size: int,
    num_chosen: int,
    max_staleness: int,
) -> Overtaken | None:
    """What the order rule forbids when the `num_chosen` oldest finished groups make the batch of `step`.

    Taking the oldest finished groups leaves the fewest outstanding ones for every due step at once, so if this
    choice breaks the rule, every choice does.
    """
    left = num_chosen
    outstanding = 0
    for version in sorted({*queued, *in_flight}):
        finished = len(queued.get(version, ()))
        taken = min(left, finished)
        left -= taken
        outstanding += finished - taken + len(in_flight.get(version, ()))
        due_step = version + max_staleness
        if outstanding > batch_size * max(0, due_step - step):
            blocking = [
                record
                for admitted, records in sorted(in_flight.items())
                if admitted <= version
                for record in records.values()
            ]
            return Overtaken(due_step=due_step, records=tuple(blocking))
    return None


def batch_of(queued: ByVersion, *, num_chosen: int) -> list[DrawRecord]:
    """The `num_chosen` oldest finished groups."""
    return list(islice(oldest_first(queued), num_chosen))


def chosen_draw(record: DrawRecord, *, step: int, now_s: float) -> ChosenDraw:
    """What the trainer and the reports need to know of a chosen group."""
    staleness = step - record.oldest_version
    in_queue = step - record.finished_at_version
    return ChosenDraw(
        draw=record.draw,
        num_members=record.num_members,
        num_tokens=record.num_tokens,
        oldest_version=record.oldest_version,
        newest_version=record.newest_version,
        staleness=staleness,
        staleness_in_flight=staleness - in_queue,
        staleness_in_queue=in_queue,
        in_flight_s=record.finished_s - record.admitted_s,
        in_queue_s=now_s - record.finished_s,
    )
