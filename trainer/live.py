"""What a person sees of a run: a live table on a terminal, plain lines elsewhere."""

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """The figures of one training step that fit into 80 columns."""

    step: int
    reward: float
    accuracy: float
    entropy: float
    staleness: float
    tokens_per_s: float
    wait_s: float
    step_s: float
    gap: float


class Display:
    """Steps, phases and results for a person. Without a terminal each becomes one plain line on stdout."""

    def __init__(self, num_steps: int, console: Console | None = None) -> None:
        self._console = console if console is not None else Console(file=sys.stdout, highlight=False)
        self._rows: deque[StepLine] = deque(maxlen=12)
        self._phase = ""
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._bar = self._progress.add_task("steps", total=num_steps)
        self._live: Live | None = None

    @property
    def is_terminal(self) -> bool:
        """Whether a person sees the live table, so that log lines would tear it."""
        return self._console.is_terminal

    @contextmanager
    def open(self) -> Iterator[None]:
        """Show the live table within the block, where stdout is a terminal."""
        if not self._console.is_terminal:
            yield
            return
        with Live(self._render(), console=self._console, refresh_per_second=4) as live:
            self._live = live
            try:
                yield
            finally:
                live.update(self._render())
                self._live = None

    def phase(self, words: str) -> None:
        """What the run does now."""
        self._phase = words
        if self._live is None:
            self._console.print(words)
        else:
            self._live.update(self._render())

    def result(self, words: str) -> None:
        """A line that stays."""
        self._console.print(words, soft_wrap=True)

    def step(self, line: StepLine) -> None:
        self._rows.append(line)
        self._progress.update(self._bar, completed=line.step)
        if self._live is not None:
            self._live.update(self._render())
            return
        self._console.print(
            f"step {line.step}: reward {line.reward:+.3f}, accuracy {line.accuracy:.1%}, entropy {line.entropy:.3f}, "
            f"staleness {line.staleness:.2f}, {line.tokens_per_s:.0f} tokens/s, waited {line.wait_s:.2f} s of "
            f"{line.step_s:.2f} s, gap {line.gap:.1e}",
            soft_wrap=True,
        )

    def _render(self) -> Group:
        table = Table(box=None, pad_edge=False, expand=False)
        for name in ("step", "reward", "accuracy", "entropy", "stale", "tok/s", "wait s", "step s", "gap"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self._rows:
            table.add_row(
                str(row.step),
                f"{row.reward:+.3f}",
                f"{row.accuracy:.1%}",
                f"{row.entropy:.3f}",
                f"{row.staleness:.2f}",
                f"{row.tokens_per_s:.0f}",
                f"{row.wait_s:.2f}",
                f"{row.step_s:.2f}",
                f"{row.gap:.1e}",
            )
        return Group(table, self._progress, self._phase)
