"""Consumption: what may still be trained at a step, and how many members a group must keep."""

from asyppo_async.trainer.coordinator.decisions import DecisionSettings
from asyppo_async.trainer.coordinator.draws import DrawRecord, GroupFacts


def token_bound(*, step: int, max_staleness: int) -> int:
    """The oldest version whose tokens may have weight in the policy update of `step` (invariant 2).

    Staleness counts training steps: the trainer's version at the start of the step minus the token's version.
    """
    return step - max_staleness


def is_stale(record: DrawRecord, *, step: int, max_staleness: int) -> bool:
    """Whether a finished group holds a token beyond the bound; a group is as old as its oldest token."""
    return record.oldest_version < token_bound(step=step, max_staleness=max_staleness)


def group_fault(
    group: GroupFacts, record: DrawRecord, settings: DecisionSettings, *, version: int
) -> str | None:
    """Why a finished group cannot be trained; None if it can. `version`: the trainer's."""
    if group.num_members < min_members(group_size=settings.group_size, num_critics=settings.num_critics):
        return "too_few_members"
    if group.newest_version > version:
        return "rolled_back"
    if not record.admission_version <= group.oldest_version <= group.newest_version:
        return "older_than_admission"
    return None


def min_members(*, group_size: int, num_critics: int) -> int:
    """How many responses a group must keep after the loss of members to be trained as `reduced`.

    At least two, so that there is something to compare; one per critic, for each trains on its own part of the
    group; and half of the group. A group of one has nothing to lose.
    """
    return min(group_size, max(2, num_critics, (group_size + 1) // 2))
