"""What the tiny-model studies measured, one JSON file a study, written after every run: a killed study goes on."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One arm with one seed."""

    arm: str
    seed: int
    num_steps: int
    spec: str
    """Of the arm; see `arms.Arm`."""
    commit: str
    """Of the code that ran."""
    cpu_s: float
    num_tokens: int
    """Response tokens that were generated and trained on."""
    rewards: list[float]
    """Mean reward of each step."""
    figures: dict[str, float]
    """Means over the run of what the step reports."""
    lengths: list[float] = field(default_factory=list)
    """Mean tokens of a response in each step, in tasks in which they vary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What was measured on the policies of one seed, beside learning."""

    name: str
    seed: int
    commit: str
    cpu_s: float
    rows: list[dict[str, float | str]]


class Results:
    """All of one study."""

    def __init__(self, study: str, folder: Path = FOLDER) -> None:
        self._path = folder / f"{study}.json"
        self.runs: list[Run] = []
        self.measurements: list[Measurement] = []
        if self._path.is_file():
            tree = json.loads(self._path.read_text(encoding="utf-8"))
            self.runs = [Run(**run) for run in tree["runs"]]
            self.measurements = [Measurement(**measurement) for measurement in tree["measurements"]]

    def run(self, arm: str, seed: int, *, spec: str, num_steps: int) -> Run | None:
        """The stored run of exactly this."""
        wanted = (arm, seed, spec, num_steps)
        return next(
            (run for run in self.runs if (run.arm, run.seed, run.spec, run.num_steps) == wanted), None
        )

    def of_arm(self, arm: str) -> list[Run]:
        """By seed."""
        return sorted((run for run in self.runs if run.arm == arm), key=lambda run: run.seed)

    def measured(self, name: str) -> list[Measurement]:
        """By seed."""
        return sorted((one for one in self.measurements if one.name == name), key=lambda one: one.seed)

    def add(self, new: Run | Measurement) -> None:
        """Store it in place of an older one of the same arm (or name) and seed."""
        if isinstance(new, Run):
            self.runs = [run for run in self.runs if (run.arm, run.seed) != (new.arm, new.seed)] + [new]
        else:
            others = [one for one in self.measurements if (one.name, one.seed) != (new.name, new.seed)]
            self.measurements = [*others, new]
        self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(exist_ok=True)
        lines = [f'"{key}": [\n{_lines(items)}\n]' for key, items in self._tables()]
        unfinished = self._path.with_suffix(".unfinished")
        unfinished.write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")
        os.replace(unfinished, self._path)

    def _tables(self) -> tuple[tuple[str, Sequence[Run | Measurement]], ...]:
        return (("runs", self.runs), ("measurements", self.measurements))


def _lines(items: Sequence[Run | Measurement]) -> str:
    return ",\n".join(json.dumps(asdict(item), separators=(",", ":")) for item in items)
