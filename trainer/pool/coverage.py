"""What a pool covers: trajectories by length bucket, verdict and policy, what is missing, and how to draw evenly."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from asyppo_async.trainer.pool.shards import Entry

NUM_EDGES = 3
"""Edges of length where none are configured."""


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One kind of trajectory."""

    policy: str
    bucket: int
    is_right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    edges: tuple[int, ...]
    policies: tuple[str, ...]
    """In order of their mean reward, weak to strong."""
    counts: Counter[Cell]
    num_prompts: int
    num_tokens: int
    mean_rewards: dict[str, float]

    @property
    def buckets(self) -> list[str]:
        """Words for each length bucket."""
        lows = [1, *(edge + 1 for edge in self.edges)]
        return [*(f"{low}-{edge}" for low, edge in zip(lows, self.edges, strict=False)), f"{lows[-1]}-"]

    def missing(self, least: int) -> list[tuple[Cell, int]]:
        """Cells with fewer than `least` trajectories, and how many they have."""
        cells = [
            Cell(policy, bucket, is_right)
            for policy in self.policies
            for bucket in range(len(self.edges) + 1)
            for is_right in (True, False)
        ]
        return [(cell, self.counts[cell]) for cell in cells if self.counts[cell] < least]


def length_edges(entries: Sequence[Entry], configured: Sequence[int]) -> tuple[int, ...]:
    """The configured edges, or the powers of two below the longest response."""
    if configured:
        return tuple(sorted(configured))
    longest = max(entry.num_tokens for entry in entries)
    top = max(1, (longest - 1).bit_length())
    return tuple(2 ** (top - down) for down in range(min(NUM_EDGES, top), 0, -1))


def bucket_of(num_tokens: int, edges: Sequence[int]) -> int:
    """Index of the first edge that is not below the length."""
    return int(np.searchsorted(list(edges), num_tokens))


def cover(entries: Sequence[Entry], edges: Sequence[int]) -> Coverage:
    """Count the trajectories of a pool."""
    by_policy: dict[str, list[float]] = {}
    for entry in entries:
        by_policy.setdefault(entry.policy, []).append(entry.reward)
    means = {policy: float(np.mean(rewards)) for policy, rewards in by_policy.items()}
    return Coverage(
        edges=tuple(edges),
        policies=tuple(sorted(means, key=lambda policy: (means[policy], policy))),
        counts=Counter(
            Cell(entry.policy, bucket_of(entry.num_tokens, edges), entry.is_right) for entry in entries
        ),
        num_prompts=len({entry.prompt_id for entry in entries}),
        num_tokens=sum(entry.num_tokens for entry in entries),
        mean_rewards=means,
    )


def balanced_shares(entries: Sequence[Entry], edges: Sequence[int]) -> NDArray[np.float64]:
    """[B] probabilities of a draw under which every length bucket and verdict that is there comes equally often."""
    kinds = [(bucket_of(entry.num_tokens, edges), entry.is_right) for entry in entries]
    counts = Counter(kinds)
    return np.array([1 / (counts[kind] * len(counts)) for kind in kinds])


def coverage_table(coverage: Coverage) -> Table:
    """For a person: one row a policy, right and wrong trajectories of each length bucket."""
    table = Table(title="trajectories, right / wrong, by tokens of the response", title_justify="left")
    table.add_column("policy")
    table.add_column("mean reward", justify="right")
    for bucket in coverage.buckets:
        table.add_column(bucket, justify="right")
    for policy in coverage.policies:
        cells = [
            " / ".join(str(coverage.counts[Cell(policy, bucket, is_right)]) for is_right in (True, False))
            for bucket in range(len(coverage.edges) + 1)
        ]
        table.add_row(policy, f"{coverage.mean_rewards[policy]:+.2f}", *cells)
    return table


def missing_lines(coverage: Coverage, least: int) -> list[str]:
    """What is missing, in words: per length bucket and verdict over all policies, then cell by cell."""
    lines = []
    for bucket, words in enumerate(coverage.buckets):
        for is_right, verdict in ((True, "right"), (False, "wrong")):
            there = sum(coverage.counts[Cell(policy, bucket, is_right)] for policy in coverage.policies)
            if there < least:
                lines.append(f"missing: {verdict} responses of {words} tokens, {there} of {least} at least")
    sparse = coverage.missing(least)
    cells = 2 * len(coverage.buckets) * len(coverage.policies)
    lines.append(f"{len(sparse)} of {cells} cells hold fewer than {least}")
    return lines
