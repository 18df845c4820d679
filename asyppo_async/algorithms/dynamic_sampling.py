"""Dynamic sampling (DAPO 2503.14476): groups that are all right or all wrong are replaced until the batch is
full.

Torch-free.
"""

from dataclasses import dataclass
from math import ceil
from typing import Literal

GroupVerdict = Literal["kept", "all_right", "all_wrong", "surplus"]


def judge_group(num_correct: int, group_size: int) -> GroupVerdict:
    """kept iff 1 <= correct <= K - 1, by the binary verdict and not by a shaped reward."""
    if not 0 <= num_correct <= group_size or group_size < 1:
        raise ValueError(f"a group of {group_size} cannot have {num_correct} right answers")
    if num_correct == group_size:
        return "all_right"
    return "all_wrong" if num_correct == 0 else "kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingCounts:
    """Groups of the current batch by verdict."""

    kept: int
    all_right: int
    all_wrong: int
    surplus: int

    @property
    def judged(self) -> int:
        return self.kept + self.all_right + self.all_wrong

    @property
    def kept_share(self) -> float:
        """Of the judged groups; NaN before the first."""
        return self.kept / self.judged if self.judged else float("nan")


class DynamicSampling:
    """Fills one batch of groups."""

    def __init__(self, *, target_groups: int, max_groups: int) -> None:
        """`max_groups` bounds what is generated for one batch: if nothing varies there is no end to it
        otherwise.
        """
        if not 1 <= target_groups <= max_groups:
            raise ValueError(f"target_groups lies in [1, max_groups = {max_groups}], got {target_groups}")
        self._target, self._max = target_groups, max_groups
        self._counts: dict[GroupVerdict, int] = dict.fromkeys(
            ("kept", "all_right", "all_wrong", "surplus"), 0
        )

    @property
    def counts(self) -> SamplingCounts:
        return SamplingCounts(
            kept=self._counts["kept"],
            all_right=self._counts["all_right"],
            all_wrong=self._counts["all_wrong"],
            surplus=self._counts["surplus"],
        )

    @property
    def complete(self) -> bool:
        """The batch is full, or as full as its budget makes it."""
        return self._counts["kept"] >= self._target or self.counts.judged >= self._max

    @property
    def missing(self) -> int:
        return max(0, self._target - self._counts["kept"])

    def offer(self, *, num_correct: int, group_size: int) -> GroupVerdict:
        """Judge a finished group; one that would be kept when the batch is full is surplus and stays in the
        queue.
        """
        verdict = judge_group(num_correct, group_size)
        if verdict == "kept" and self.missing == 0:
            verdict = "surplus"
        self._counts[verdict] += 1
        return verdict

    def next_request(self, *, in_flight: int, default_share: float) -> int:
        """Groups to ask for now so that the missing ones are expected: missing / share of kept - in flight.

        Args:
            in_flight: groups asked for and not yet judged.
            default_share: assumed until a group was kept.
        """
        counts = self.counts
        share = counts.kept_share if counts.kept else default_share
        wanted = ceil(self.missing / share) - in_flight
        return max(0, min(wanted, self._max - counts.judged - in_flight))
