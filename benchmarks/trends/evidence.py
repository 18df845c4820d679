"""Writes tables and plots of docs/evidence.md from the stored results; the words around them are written by hand.

python -m benchmarks.trends.evidence
"""

import re
from pathlib import Path

from benchmarks.trends.results import Results
from benchmarks.trends.tables import BLOCKS, STUDY_OF, block

PAGE = Path(__file__).parents[2] / "docs" / "evidence.md"
PLOTS = PAGE.parent / "evidence"


def page_with_tables(page: str) -> str:
    """The page with every block between its marks made anew."""
    for name in BLOCKS:
        table = block(name, Results(STUDY_OF[name]))
        marked = f"<!-- {name} -->\n{table}\n<!-- end -->"
        page, found = re.subn(
            rf"<!-- {name} -->\n.*?<!-- end -->", lambda _, new=marked: new, page, flags=re.DOTALL
        )
        if found != 1:
            raise ValueError(f"docs/evidence.md has {found} blocks named {name}, expected one")
    return page


def main() -> None:
    from benchmarks.trends.figures import draw  # noqa: PLC0415  (matplotlib only where something is drawn)

    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    PLOTS.mkdir(exist_ok=True)
    for name in BLOCKS:
        draw(name, Results(STUDY_OF[name]), PLOTS / f"{name}.svg")


if __name__ == "__main__":
    main()
