"""Every field report that the decision core answers for has a test that says so."""

import re
from pathlib import Path

ASSIGNED = {"P37", "P38", "P39", "P40", "P41", "P45"}


def test_reports_assigned_to_the_simulation_each_have_a_marked_test() -> None:
    texts = [path.read_text() for path in Path(__file__).parent.glob("test_*.py")]
    marked = {
        name
        for text in texts
        for name in re.findall(r'^@pytest\.mark\.report\("(P\d+)"\)', text, re.MULTILINE)
    }
    assert sorted(ASSIGNED - marked) == [], "assigned reports without a test"
