"""Drawing from several tasks by weight: a fixed pattern of tasks, and epochs within each task."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm

from asyppo_async.errors import ConfigError
from asyppo_async.trainer.coordinator.sampler import Candidate, EpochSampler, Sampler, permuted_index

LONGEST_PATTERN = 10_000
_LARGEST_DENOMINATOR = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskShare:
    """The training prompts of one task, and its weight among the draws."""

    label: str
    weight: float
    prompt_ids: tuple[str, ...]


class MixedSampler:
    """Of every pattern of draws each task has exactly its share, spread evenly. Implements `Sampler`.

    The task of a draw and the prompt's place in that task's order follow from the number of the draw, so a cursor is
    all that a checkpoint keeps. An epoch belongs to a task: it sees each of its own prompts once before one comes
    again, whatever the weights, so tasks end their epochs at different times.
    """

    def __init__(self, *, shares: Sequence[TaskShare], seed: int) -> None:
        """
        Raises:
            ConfigError: weights whose pattern is too long.
            ValueError: a task without prompts, or an id twice.
        """
        for share in shares:
            EpochSampler(
                prompt_ids=share.prompt_ids, seed=seed, num_epochs=None
            )  # refuses none, and an id twice
        self._shares = tuple(shares)
        self._seed = seed
        self._pattern = pattern_of([share.weight for share in shares])
        self._counts = [0] * len(shares)
        self._ranks: list[int] = []
        """How often the pattern named an entry before this place."""
        for index in self._pattern:
            self._ranks.append(self._counts[index])
            self._counts[index] += 1
        self._num_considered = 0

    @property
    def num_prompts(self) -> int:
        return sum(len(share.prompt_ids) for share in self._shares)

    @property
    def num_considered(self) -> int:
        return self._num_considered

    @property
    def exhausted(self) -> bool:
        return False

    def seek(self, num_considered: int) -> None:
        self._num_considered = num_considered

    def share_of(self, number: int) -> TaskShare:
        """The task that the candidate of that number is drawn from."""
        return self._shares[self._pattern[number % len(self._pattern)]]

    def next_candidate(self) -> Candidate:
        number = self._num_considered
        rounds, place = divmod(number, len(self._pattern))
        self._num_considered += 1
        index = self._pattern[place]
        share = self._shares[index]
        epoch, position = divmod(rounds * self._counts[index] + self._ranks[place], len(share.prompt_ids))
        chosen = permuted_index(
            position, size=len(share.prompt_ids), key=f"{self._seed}:{share.label}:{epoch}"
        )
        return Candidate(
            number=number,
            prompt_id=share.prompt_ids[chosen],
            epoch=epoch,
            accepted=True,
            acceptance=1.0,
            success_estimate=None,
        )


def open_sampler(shares: Sequence[TaskShare], seed: int) -> Sampler:
    """Every prompt once an epoch: of the one task, or of each task of a mix."""
    if len(shares) == 1:
        return EpochSampler(prompt_ids=shares[0].prompt_ids, seed=seed, num_epochs=None)
    return MixedSampler(shares=shares, seed=seed)


def pattern_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Which entry each draw belongs to, over the shortest run of draws in which the weights come out even.

    Smooth weighted round robin: each draw goes to the entry that is furthest behind its share.

    Raises:
        ConfigError: the weights have no short common measure.
    """
    ratios = [Fraction(weight).limit_denominator(_LARGEST_DENOMINATOR) for weight in weights]
    denominator = lcm(*(ratio.denominator for ratio in ratios))
    counts = [int(ratio * denominator) for ratio in ratios]
    counts = [count // (gcd(*counts) or 1) for count in counts]
    total = sum(counts)
    if total > LONGEST_PATTERN or 0 in counts:
        raise ConfigError(
            f"task.mix: the weights {', '.join(f'{weight:g}' for weight in weights)} come out even only after "
            f"{total} draws or more, {LONGEST_PATTERN} is the most; use rounder weights such as 2 and 1"
        )
    owed = [0] * len(counts)
    pattern: list[int] = []
    for _ in range(total):
        owed = [debt + count for debt, count in zip(owed, counts, strict=True)]
        index = max(range(len(counts)), key=owed.__getitem__)
        owed[index] -= total
        pattern.append(index)
    return tuple(pattern)
