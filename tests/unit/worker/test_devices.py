"""Which device each rank gets, and whether what shares one fits on it."""

import pytest

from asyppo_async.config.placement import PlacementSection
from asyppo_async.errors import ConfigError
from asyppo_async.trainer.worker.control import Footprint, Hello
from asyppo_async.trainer.worker.devices import GroupPlaces, assign_devices, check_shared

GIB = 2**30


def places(label: str, hosts: str, *, devices: tuple[int, ...] = (), gpus: int = 4) -> GroupPlaces:
    """One rank on each host of `hosts`, a letter each."""
    names = tuple(f"cuda:{index}" for index in range(gpus)) or ("cpu",)
    hellos = [Hello(role="actor", name="", host=host, pid=1, devices=names, critic=None) for host in hosts]
    return GroupPlaces(label=label, devices=devices, hellos=tuple(hellos))


def indices(assigned: list[list[str]]) -> list[list[int]]:
    return [[int(name.removeprefix("cuda:")) for name in names] for names in assigned]


def test_groups_when_split_go_on_where_the_one_before_ended_on_each_machine() -> None:
    groups = [places("actor", "aabb"), places("critic 0", "a"), places("critic 1", "b")]
    assert indices(assign_devices(groups, share=False)) == [[0, 1, 0, 1], [2], [2]]


def test_groups_when_there_are_more_ranks_than_devices_begin_again() -> None:
    groups = [places("actor", "aa", gpus=2), places("critic 0", "a", gpus=2)]
    assert indices(assign_devices(groups, share=False)) == [[0, 1], [0]]
    assert assign_devices([places("actor", "aa", gpus=0)], share=False) == [["cpu", "cpu"]]


def test_groups_when_colocated_begin_at_the_same_device() -> None:
    groups = [places("actor", "aabb"), places("critic 0", "a"), places("critic 1", "b")]
    assert indices(assign_devices(groups, share=True)) == [[0, 1, 0, 1], [0], [0]]


def test_groups_when_bound_get_their_devices_and_the_others_keep_off_them() -> None:
    groups = [places("actor", "aaa", devices=(3, 1)), places("critic 0", "a"), places("critic 1", "ab")]
    assert indices(assign_devices(groups, share=False)) == [[3, 1, 3], [0], [2, 0]]


def test_group_when_bound_to_a_device_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(
        ConfigError, match=r"critic 1 is bound to device 4, and a has 2: cuda:0, cuda:1; change critic"
    ):
        assign_devices([places("critic 1", "a", devices=(4,), gpus=2)], share=False)


def footprint(weights: int, state: int, *, free: int, device: str = "g", on_host: bool = False) -> Footprint:
    return Footprint(
        device=device,
        on_host=on_host,
        free_bytes=free * GIB,
        weight_bytes=weights * GIB,
        state_bytes=state * GIB,
    )


@pytest.mark.parametrize(
    ("placement", "needed"),
    [
        (PlacementSection(), 1 + 4 + 2 + 6),
        (PlacementSection(mode="colocated", moves="none"), 1 + 4 + 2 + 6),
        (PlacementSection(mode="colocated"), 1 + 2 + 6),
        (PlacementSection(mode="colocated", moves="all"), 2 + 6),
    ],
)
def test_ranks_on_one_device_when_their_largest_phase_does_not_fit_are_refused_with_numbers(
    placement: PlacementSection, needed: int
) -> None:
    def ranks(free: int) -> dict[str, Footprint]:
        return {
            "actor rank 0": footprint(2, 6, free=free),
            "critic 0 rank 0": footprint(1, 4, free=free - 2),  # saw the actor's weights there
            "critic 1 rank 0": footprint(9, 9, free=99, device="another"),
        }

    check_shared(ranks(needed), placement)
    with pytest.raises(ConfigError, match=f"2 ranks share g and need {needed}.00 GiB .* {needed - 1}.00 GiB"):
        check_shared(ranks(needed - 1), placement)


def test_ranks_on_a_cpu_when_colocated_count_in_full_since_they_move_within_one_memory() -> None:
    ranks = {name: footprint(1, 4, free=9, on_host=True) for name in ("actor rank 0", "critic 0 rank 0")}
    with pytest.raises(ConfigError, match=r"need 10\.00 GiB"):
        check_shared(ranks, PlacementSection(mode="colocated", moves="all"))


def test_ranks_when_it_is_not_known_what_is_free_are_let_pass() -> None:
    unknown = Footprint(device="g", on_host=True, free_bytes=None, weight_bytes=GIB, state_bytes=GIB)
    check_shared({"actor rank 0": unknown, "critic 0 rank 0": unknown}, PlacementSection())
