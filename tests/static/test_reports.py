"""Every field report that a part of this project answers for has a test that says so."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ASSIGNED = {
    "critics": ("P62",),
    "algorithms": ("P23", "P25", "P26", "P27", "P28", "P29"),
    "weight publication": (*(f"P{number:02}" for number in range(1, 23)), "P42", "P43", "P44"),
    "decisions": ("P37", "P38", "P39", "P40", "P41", "P45"),
    "coming back": ("P46", "P52", "P53"),
    "learner": ("P35", *(f"P{number}" for number in range(53, 62)), "P63", "P64", "P84"),
    "fleet service": (
        *(f"P{number}" for number in (31, 32, 33, 34, 36, 47, 48, 49, 50, 51, *range(70, 79), 80, 81, 82)),
    ),
    "tasks and evaluation": ("P24", "P30", "P65", "P66", "P67", "P68", "P69", "P83"),
}


@pytest.mark.parametrize("part", ASSIGNED)
def test_report_when_it_is_assigned_has_a_marked_test(part: str) -> None:
    marked = {
        name
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r'^@pytest\.mark\.report\("(P\d+)"\)', path.read_text(), re.MULTILINE)
    }
    assert sorted(set(ASSIGNED[part]) - marked) == [], "assigned reports without a test"
