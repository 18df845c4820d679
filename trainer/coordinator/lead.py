"""Lead: how many groups may be outstanding so that the trainer hardly waits and the data stay young."""

from math import ceil

from asyppo_async.trainer.coordinator.decisions import DecisionSettings

TARGET_WAIT_FRACTION = 0.02
"""`lead = auto` keeps the trainer's wait for finished groups below this part of the time of a step."""


class LeadController:
    """`lead = auto`: the fewest outstanding groups that keep the trainer's wait under 2 %.

    Invariant: `B <= limit <= (eta + 1) * B`, and `2 * B <= limit` once a batch was wanted a step ahead.

    It grows at once, with the part of a step's time in which finished groups were missing. It shrinks slowly: after
    `2 * (eta + 1)` batches without any wait, by half of the surplus that was left over after each of them, less a
    margin of an eighth of a batch. A wait for a group that is due is not cured by a longer lead (the group had
    `eta` whole steps) and does not let it grow; but the groups that pile up meanwhile are no surplus either.
    """

    def __init__(self, settings: DecisionSettings) -> None:
        self._lead = settings.lead
        self._batch_size = settings.batch_size
        self._least = settings.batch_size
        self._most = (settings.max_staleness + 1) * settings.batch_size
        start = self._most if settings.lead == "saturated" else min(self._most, 2 * settings.batch_size)
        self._limit = start
        self._last_chosen_s: float | None = None
        self._waiting_since_s: float | None = None
        self._short_since_s: float | None = None
        self._shortage_s = 0.0
        self._surplus: list[int] = []
        """After each batch since the last wait or change."""

    @property
    def limit(self) -> int:
        """Most groups that may be in flight, queued or in a step."""
        return self._limit

    def restore(self, limit: int) -> None:
        """Take over what a checkpoint had learned, within the bounds of today's settings."""
        if self._lead == "auto":
            self._limit = min(self._most, max(self._least, limit))

    def check(self) -> None:
        """Raises `AssertionError` if the limit has left its bounds."""
        assert self._least <= self._limit <= self._most, (
            f"the lead lies between {self._least} and {self._most} groups, got {self._limit}"
        )

    def batch_ahead_wanted(self) -> None:
        """A step now ends only when the next one has its batch too, so two batches must fit into the lead."""
        self._least = min(self._most, 2 * self._batch_size)
        self._limit = max(self._least, self._limit)

    def waiting(self, *, shortage: bool, now_s: float) -> float:
        """The trainer asked for a batch in vain; `shortage`: too few finished groups. Seconds waited so far."""
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        self._count_shortage(now_s)
        self._short_since_s = now_s if shortage else None
        return now_s - self._waiting_since_s

    def chosen(self, *, num_surplus: int, now_s: float) -> float:
        """A batch was chosen and `num_surplus` finished groups are left over. Seconds waited for it."""
        self._count_shortage(now_s)
        waited_s = 0.0 if self._waiting_since_s is None else now_s - self._waiting_since_s
        if self._lead == "auto" and self._last_chosen_s is not None:
            self._learn(now_s - self._last_chosen_s, waited_s, num_surplus)
        self._last_chosen_s = now_s
        self._waiting_since_s = None
        self._short_since_s = None
        self._shortage_s = 0.0
        return waited_s

    def _count_shortage(self, now_s: float) -> None:
        if self._short_since_s is not None:
            self._shortage_s += now_s - self._short_since_s

    def _learn(self, interval_s: float, waited_s: float, num_surplus: int) -> None:
        tolerated_s = TARGET_WAIT_FRACTION / 2 * interval_s
        if self._shortage_s > tolerated_s:
            fraction = min(1.0, self._shortage_s / interval_s)
            self._change(ceil(self._batch_size * min(1.0, 8 * fraction)))
        elif waited_s > tolerated_s:
            self._surplus.clear()
        else:
            self._surplus.append(num_surplus)
            if len(self._surplus) >= 2 * self._most // self._batch_size:
                self._change(-max(0, min(self._surplus) - max(1, self._batch_size // 8)) // 2)

    def _change(self, number: int) -> None:
        self._surplus.clear()
        self._limit = min(self._most, max(self._least, self._limit + number))
