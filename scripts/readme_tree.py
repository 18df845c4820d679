"""Writes the README's tree: one line for every file, from the first sentence of the file's own docstring or comment.

python scripts/readme_tree.py
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOPS = ("asyppo_async", "fleet", "trainer", "proto", "examples", "benchmarks", "scripts", "tests")
LEFT_OUT = re.compile(
    r"__pycache__|__init__\.py|_pb2|py\.typed|^tests/.*/.*|^benchmarks/trends/results/|\.egg-info"
)
HEADING = "## The tree\n"
COLUMN = 36


def first_sentence(text: str) -> str:
    paragraph = text.strip().split("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=[a-z0-9`)])\. (?=[A-Z`])", paragraph)[0].strip().rstrip(".:")


def purpose_of(path: Path) -> str:
    """What a file says of itself in its first words."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return first_sentence(ast.get_docstring(ast.parse(text)) or "")
    lines = [
        line for line in text.splitlines() if line.startswith(("#", "//", "{#")) and not line.startswith("#!")
    ]
    return first_sentence(" ".join(line.strip("#/{} ") for line in lines[:2]))


def wanted(path: Path) -> bool:
    return path.is_file() and not LEFT_OUT.search(path.relative_to(ROOT).as_posix())


def lines_of(folder: Path, depth: int) -> Iterator[str]:
    yield "  " * depth + folder.name + "/"
    for entry in sorted(folder.iterdir(), key=lambda entry: (entry.is_dir(), entry.name)):
        if wanted(entry):
            yield f"{'  ' * (depth + 1) + entry.name:<{COLUMN}}  {purpose_of(entry)}"
        elif entry.is_dir() and any(wanted(inner) for inner in entry.rglob("*")):
            yield from lines_of(entry, depth + 1)


def tree() -> str:
    lines = [line for top in TOPS for line in lines_of(ROOT / top, 0)]
    return "```\n" + "\n".join(lines) + "\n```\n"


def readme_with_tree() -> str:
    before, _, _ = (ROOT / "README.md").read_text(encoding="utf-8").partition(HEADING)
    return f"{before}{HEADING}\nEach line is the first sentence of the file itself (`make tree`).\n\n{tree()}"


if __name__ == "__main__":
    (ROOT / "README.md").write_text(readme_with_tree(), encoding="utf-8")
