"""Every golden number is compared with something: its key stands in a test that reads the file."""

import json
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
KEYS = list(json.loads((TESTS / "golden" / "algorithms.json").read_text(encoding="utf-8")))
READERS = {
    path: text
    for path in sorted(TESTS.rglob("test_*.py"))
    if re.search(r"\bgolden\[", text := path.read_text(encoding="utf-8"))
}


@pytest.mark.parametrize("key", KEYS)
def test_golden_number_is_read_by_a_test(key: str) -> None:
    assert any(f'"{key}"' in text for text in READERS.values()), (
        f"no test compares anything with {key!r} of tests/golden/algorithms.json"
    )


@pytest.mark.parametrize("path", READERS, ids=lambda path: path.stem)
def test_key_that_a_test_reads_is_in_the_file(path: Path) -> None:
    keys = re.findall(r'\bgolden\["([^"]+)"\]', READERS[path])
    assert [key for key in keys if key not in KEYS] == []
