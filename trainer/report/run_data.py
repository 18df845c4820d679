"""What a run folder holds, read for a report; a run that is still going, or that died, has one too."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from asyppo_async.errors import ConfigError

Row: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    folder: Path
    config: str
    """The text of config.toml."""
    summary: Row
    """Empty where the run has not ended."""
    steps: tuple[Row, ...]
    """Of the lineage of the final weights: rows that a resume abandoned are left out."""
    evaluations: tuple[Row, ...]
    samples: tuple[Row, ...]

    @property
    def versions(self) -> list[float]:
        return self.column("version")

    def column(self, name: str) -> list[float]:
        """One number for each step; NaN where the step has none."""
        return numbers(self.steps, name)

    def names(self, prefix: str, suffix: str = "") -> list[str]:
        """The metrics whose names begin and end so, in order of first appearance."""
        found = dict.fromkeys(name for row in self.steps for name in row)
        return [name for name in found if name.startswith(prefix) and name.endswith(suffix)]


def numbers(rows: Sequence[Row], name: str) -> list[float]:
    """A column of numbers; NaN for what is missing, null or no number."""
    values = (row.get(name) for row in rows)
    return [
        float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        for value in values
    ]


def read_run(folder: Path) -> RunData:
    """Read a run folder.

    Raises:
        ConfigError: It is none, or a file in it cannot be read.
    """
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder} is no run folder: it has no config.toml")
    summary = folder / "summary.json"
    return RunData(
        folder=folder,
        config=(folder / "config.toml").read_text(encoding="utf-8"),
        summary=_parsed(summary, summary.read_text(encoding="utf-8"), 1) if summary.exists() else {},
        steps=_rows(folder / "metrics.jsonl"),
        evaluations=_rows(folder / "evaluations.jsonl"),
        samples=_rows(folder / "samples.jsonl"),
    )


def _rows(path: Path) -> tuple[Row, ...]:
    if not path.exists():
        return ()
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()  # a run that is still writing
    rows = [_parsed(path, line, number) for number, line in enumerate(lines, start=1)]
    return tuple(row for row in rows if not row.get("abandoned"))


def _parsed(path: Path, text: str, line: int) -> Row:
    try:
        row = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}, line {line}: no JSON: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{path}, line {line}: not a JSON object")
    return row
