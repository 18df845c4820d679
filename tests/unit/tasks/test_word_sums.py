"""The data set that an example writes: right, without repetitions, and the same for the same seed."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "examples" / "word_sums.py"
SPEC = importlib.util.spec_from_file_location("word_sums", SCRIPT)
assert SPEC is not None and SPEC.loader is not None
word_sums = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(word_sums)


def test_rows_when_written_twice_then_are_equal_different_from_each_other_and_right(tmp_path: Path) -> None:
    for name in ("first.jsonl", "second.jsonl"):
        subprocess.run([sys.executable, SCRIPT, "--out", tmp_path / name], check=True, timeout=60)
    text = (tmp_path / "first.jsonl").read_text()
    assert text == (tmp_path / "second.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert len({json.dumps(row["messages"]) for row in rows}) == len(rows) == 160
    for row in rows:
        words = re.findall(r"\w+", row["messages"][-1]["content"])
        numbers = [word_sums.WORDS.index(word) for word in words if word in word_sums.WORDS]
        assert len(numbers) == 2 and row["answer"] == str(sum(numbers))
    assert word_sums.rows(160, seed=1) != rows
