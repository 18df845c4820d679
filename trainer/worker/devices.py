"""Which device each rank gets, and whether everything that shares one fits on it."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyppo_async.config.placement import PlacementSection
from asyppo_async.errors import ConfigError
from asyppo_async.trainer.worker.control import Footprint, Hello

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlaces:
    """Where the ranks of one group are, in rank order."""

    label: str
    devices: tuple[int, ...]
    """Indices on each machine that the group is bound to; empty: as they come."""
    hellos: tuple[Hello, ...]


def assign_devices(groups: Sequence[GroupPlaces], *, share: bool) -> list[list[str]]:
    """The device of each rank of each group.

    Ranks of a machine get its devices in turn. Groups that do not share go on where the one before them ended, over the
    devices that no group is bound to; where there are fewer devices than ranks they begin again.

    Raises:
        ConfigError: a group is bound to a device that a machine has not.
    """
    bound: dict[str, set[int]] = defaultdict(set)
    for group in groups:
        for hello in group.hellos:
            bound[hello.host] |= set(group.devices)
    next_free: Counter[str] = Counter()
    assigned = []
    for group in groups:
        names, own = [], Counter[str]()
        for hello in group.hellos:
            there = range(len(hello.devices))
            if group.devices:
                index = group.devices[own[hello.host] % len(group.devices)]
            elif share:
                index = there[own[hello.host] % len(there)]
            else:
                free = [device for device in there if device not in bound[hello.host]] or list(there)
                index = free[next_free[hello.host] % len(free)]
                next_free[hello.host] += 1
            if index not in there:
                raise ConfigError(
                    f"{group.label} is bound to device {index}, and {hello.host} has {len(there)}: "
                    f"{', '.join(hello.devices)}; change {group.label.split()[0]}.devices"
                )
            own[hello.host] += 1
            names.append(hello.devices[index])
        assigned.append(names)
    return assigned


def check_shared(footprints: Mapping[str, Footprint], placement: PlacementSection) -> None:
    """Whether ranks that share a device fit on it together: all that they hold, or if it moves, the largest phase.

    Args:
        footprints: of each rank, by its label.
        placement: of the run.

    Raises:
        ConfigError: they do not; with what each needs, what is free, and what to change.
    """
    by_device: dict[str, dict[str, Footprint]] = defaultdict(dict)
    for label, footprint in footprints.items():
        by_device[footprint.device][label] = footprint
    for device, ranks in by_device.items():
        # What is free was seen by each rank before it loaded: the first of them saw most.
        seen = [rank.free_bytes for rank in ranks.values() if rank.free_bytes is not None]
        needed = _needed(list(ranks.values()), placement)
        if len(ranks) > 1 and seen and needed > max(seen):
            listed = "; ".join(
                f"{label}: {rank.weight_bytes / _GIB:.2f} GiB of weights, {rank.state_bytes / _GIB:.2f} GiB of "
                "gradients and optimizer"
                for label, rank in ranks.items()
            )
            raise ConfigError(
                f"{len(ranks)} ranks share {device} and need {needed / _GIB:.2f} GiB there with placement.mode = "
                f"{placement.mode!r}, and {max(seen) / _GIB:.2f} GiB were free: {listed}; {_advice(placement)}"
            )


def _needed(ranks: Sequence[Footprint], placement: PlacementSection) -> int:
    both = [rank.weight_bytes + rank.state_bytes for rank in ranks]
    # Of a CPU, host memory is the device's: what moves there frees nothing.
    if placement.mode == "split" or placement.moves == "none" or ranks[0].on_host:
        return sum(both)
    if placement.moves == "all":
        return max(both)
    return sum(rank.weight_bytes for rank in ranks) + max(rank.state_bytes for rank in ranks)


def _advice(placement: PlacementSection) -> str:
    ways = ["give the groups devices of their own (actor.devices, critic.devices)"]
    if placement.mode == "split":
        ways.append("placement.mode = 'colocated' where a GPU is what is full")
    elif placement.moves != "all":
        ways.append("placement.moves = 'all'")
    return ", ".join([*ways, "more ranks with zero_stage = 3", "or smaller models"])
