"""`asyppo-train trace RUN`: responses token by token on a page, and how often a critic sees where an answer turned."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
from jinja2 import Environment, StrictUndefined
from numpy.typing import NDArray

from asyppo_async.errors import ConfigError
from asyppo_async.tasks.arithmetic import first_slip

NUM_SHOWN = 40
"""Responses on a page, the newest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """One response as `traces.jsonl` has it."""

    step: int
    prompt_id: str
    task: str
    prompt: str
    answer: str
    reward: float
    tokens: tuple[str, ...]
    values: NDArray[np.float64]
    """[M, T]"""
    advantages: tuple[float, ...]
    std: tuple[float, ...]
    log_ratio: tuple[float, ...]
    kinds: tuple[str, ...]
    advantage_masked: tuple[bool, ...]
    entropy_filtered: tuple[bool, ...]
    versions: tuple[int, ...]

    @property
    def value(self) -> NDArray[np.float64]:
        """[T] mean over the critics."""
        return np.asarray(self.values.mean(axis=0))

    @property
    def largest_fall(self) -> int | None:
        """Token after which the value falls most, against the value before it; None: it never falls."""
        falls = self.value[:-1] - self.value[1:]
        return int(falls.argmax()) if len(falls) and falls.max() > 0 else None

    @property
    def slip(self) -> int | None:
        """Token at which a running sum first goes wrong; None: unknown, or nowhere."""
        if self.task != "arithmetic" or any(len(token) > 1 for token in self.tokens):
            return None
        return first_slip(self.prompt, "".join(self.tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlipCount:
    """Of wrong responses whose slip is known and is not their last token."""

    num_slips: int
    num_at_slip: int
    """The largest fall of value is at the slip."""
    num_near: int
    """... or within two tokens of it."""
    by_chance: float
    """Expected share at the slip if the fall were at any token alike."""

    def __str__(self) -> str:
        if not self.num_slips:
            return "no response whose slip is known"
        return (
            f"largest fall of value at the slip in {self.num_at_slip} of {self.num_slips} wrong responses "
            f"({self.num_at_slip / self.num_slips:.0%}; by chance {self.by_chance:.0%}), within two tokens of it in "
            f"{self.num_near / self.num_slips:.0%}"
        )


def read_traces(folder: Path, prompt_id: str | None = None) -> list[Traced]:
    """The traces of a run, oldest first.

    Raises:
        ConfigError: No run folder, no traces in it, or none of that prompt.
    """
    path = folder / "traces.jsonl"
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder} is no run folder: it has no config.toml")
    if not path.is_file():
        raise ConfigError(
            f"{folder} has no traces: a run with critics keeps tracking.samples_per_step of each step"
        )
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    rows = [row for row in map(json.loads, lines) if not row.get("abandoned")]
    chosen = [row for row in rows if prompt_id in (None, row["prompt_id"])]
    if not chosen:
        known = ", ".join(sorted({row["prompt_id"] for row in rows})[:5])
        raise ConfigError(f"{folder} has no trace of prompt {prompt_id!r}; it has some of {known}, ...")
    return [_traced(row) for row in chosen]


def _traced(row: dict[str, list[float] | str | float]) -> Traced:
    plain = {key: row[key] for key in ("step", "prompt_id", "task", "prompt", "answer", "reward")}
    arrays = ("tokens", "advantages", "std", "log_ratio", "advantage_masked", "entropy_filtered", "versions")
    return Traced(
        **plain,  # type: ignore[arg-type]
        **{key: tuple(row[key]) for key in arrays},  # type: ignore[arg-type]
        values=np.array(row["values"], dtype=np.float64),
        kinds=tuple(row["class"]),  # type: ignore[arg-type]
    )


def count_slips(traces: Sequence[Traced]) -> SlipCount:
    """How often the critics notice where a wrong answer turned."""
    cases = [
        (trace.slip, trace.largest_fall, len(trace.tokens) - 1)
        for trace in traces
        if trace.reward < 1 and trace.slip is not None and trace.slip < len(trace.tokens) - 1
    ]
    distances = [abs(slip - fall) for slip, fall, _ in cases if slip is not None and fall is not None]
    return SlipCount(
        num_slips=len(cases),
        num_at_slip=sum(distance == 0 for distance in distances),
        num_near=sum(distance <= 2 for distance in distances),
        by_chance=float(np.mean([1 / places for *_, places in cases])) if cases else 0.0,
    )


def write_trace_page(folder: Path, traces: Sequence[Traced]) -> Path:
    """Write `trace.html` into a run folder, in place of an older one."""
    template = files("asyppo_async.trainer.report").joinpath("trace.html.jinja").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    shown = [_shown(trace) for trace in reversed(traces[-NUM_SHOWN:])]
    page = folder / "trace.html"
    unfinished = folder / ".trace.html.partial"
    html = environment.from_string(template).render(
        name=folder.name, traces=shown, num_traces=len(traces), slips=str(count_slips(traces))
    )
    unfinished.write_text(html, encoding="utf-8")
    os.replace(unfinished, page)
    return page


def _shown(trace: Traced) -> dict[str, object]:
    """One response for the template: each token with its three colours, its marks and its figures."""
    largest_advantage = max(0.01, *map(abs, trace.advantages))
    largest_std = max(0.01, *trace.std)
    cells = []
    for index, token in enumerate(trace.tokens):
        value = float(trace.value[index])
        marks = [
            words
            for words, holds in (
                ("masked", trace.advantage_masked[index]),
                ("filtered", trace.entropy_filtered[index]),
                (trace.kinds[index].replace("_", " "), trace.kinds[index] != "trained"),
                ("new version", index > 0 and trace.versions[index] != trace.versions[index - 1]),
                ("slip", index == trace.slip),
                ("largest fall", index == trace.largest_fall),
            )
            if holds
        ]
        values = ", ".join(f"{own[index]:+.3f}" for own in trace.values)
        cells.append(
            {
                "text": token.replace("\n", "\u21b5") or "\u2205",
                "value": _red_green(value),
                "advantage": _red_green(trace.advantages[index] / largest_advantage),
                "std": f"rgba(107,91,176,{trace.std[index] / largest_std:.2f})",
                "marks": marks,
                "title": f"V {values}; A {trace.advantages[index]:+.3f}; std {trace.std[index]:.3f}; ratio "
                f"{np.exp(trace.log_ratio[index]):.3f}; version {trace.versions[index]}; {', '.join(marks)}",
            }
        )
    return {
        "step": trace.step,
        "prompt_id": trace.prompt_id,
        "prompt": trace.prompt,
        "answer": trace.answer,
        "reward": trace.reward,
        "cells": cells,
    }


def _red_green(score: float) -> str:
    """-1 red, 0 white, 1 green."""
    depth = min(1.0, abs(score))
    colour = "47,143,78" if score > 0 else "192,57,43"
    return f"rgba({colour},{0.75 * depth:.2f})"
