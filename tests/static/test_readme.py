"""The README's tree is that of the files, and every file says what it is for."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("readme_tree", ROOT / "scripts" / "readme_tree.py")
assert SPEC is not None and SPEC.loader is not None
readme_tree = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(readme_tree)


def test_tree_of_the_readme_is_that_of_the_files() -> None:
    assert readme_tree.readme_with_tree() == (ROOT / "README.md").read_text(), "run `make tree`"


def test_every_file_of_the_tree_says_what_it_is_for() -> None:
    files = [
        line
        for line in readme_tree.tree().splitlines()
        if not line.endswith("/") and not line.startswith("```")
    ]
    assert len(files) > 100
    assert [line for line in files if re.fullmatch(r"\s*\S+\s*", line)] == []
