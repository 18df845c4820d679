"""Micro-batches: responses of similar length side by side, right-padded, bounded by a budget of tokens.

Right padding under a causal mask needs no attention mask: no token of a row sees the padding behind it.

Legend: `R` rows and `L` columns of a micro-batch, `N` response tokens in it, `P` prompt and `T` response tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyppo_async.types import TokenSequences

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows of one forward. Response token n of the request is predicted by the state at `states[n]`."""

    sequences: Int64Array
    """[R] indices into the request, longest first."""
    input_ids: Int64Array
    """[R, L]; the last response token is left out, since nothing is asked of the state after it."""
    states: Int64Array
    """[N] flat indices into [R * L]: the slice `[P-1 : P+T-1]` of every row (`algorithms.md` 0.1)."""
    tokens: Int64Array
    """[N] flat indices into the per-token arrays of the request."""
    token_ids: Int64Array
    """[N]"""
    response_lengths: Int64Array
    """[R]"""

    def lengths_of(self, kept: NDArray[np.bool_]) -> Int64Array:
        """[R] number of kept tokens, [N] bool, of each row."""
        rows = np.repeat(np.arange(len(self.response_lengths)), self.response_lengths)
        return np.bincount(rows[kept], minlength=len(self.response_lengths)).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Where each sequence of a request lies in its flat arrays."""

    input_lengths: Int64Array
    """[B] P + T - 1"""
    prompt_starts: Int64Array
    prompt_lengths: Int64Array
    response_starts: Int64Array
    response_lengths: Int64Array


def lay_out(sequences: TokenSequences) -> RowLayout:
    prompts = sequences.prompt_lengths.astype(np.int64)
    responses = sequences.response_lengths.astype(np.int64)
    return RowLayout(
        input_lengths=prompts + responses - 1,
        prompt_starts=prompts.cumsum() - prompts,
        prompt_lengths=prompts,
        response_starts=responses.cumsum() - responses,
        response_lengths=responses,
    )


def plan_rows(lengths: Int64Array, budget_tokens: int) -> list[Int64Array]:
    """Cut rows, longest first, into micro-batches of at most `budget_tokens` tokens, padding included.

    A row that is longer than the budget is a micro-batch of its own.

    Args:
        lengths: [B] input tokens of each row.
        budget_tokens: rows times the longest row of a micro-batch.

    Returns:
        Indices into `lengths`; every row is in exactly one.
    """
    order = np.argsort(-lengths, kind="stable")
    plan = []
    start = 0
    while start < len(order):
        longest = int(lengths[order[start]])
        num_rows = max(1, budget_tokens // max(longest, 1))
        plan.append(order[start : start + num_rows])
        start += num_rows
    return plan


def micro_batches(
    sequences: TokenSequences, layout: RowLayout, chosen: Int64Array, budget_tokens: int
) -> Iterator[MicroBatch]:
    """The micro-batches of the `chosen` sequences (indices; one that is chosen twice is two rows)."""
    for rows in plan_rows(layout.input_lengths[chosen], budget_tokens):
        yield _fill(sequences, layout, chosen[rows])


def ranges(starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """`starts[i], starts[i] + 1, ...` for `lengths[i]` numbers each, end to end."""
    offsets: Int64Array = np.repeat(starts - (lengths.cumsum() - lengths), lengths)
    return np.arange(len(offsets), dtype=np.int64) + offsets


def _fill(sequences: TokenSequences, layout: RowLayout, rows: Int64Array) -> MicroBatch:
    prompts, responses = layout.prompt_lengths[rows], layout.response_lengths[rows]
    width = int(layout.input_lengths[rows].max())
    row_starts = np.arange(len(rows), dtype=np.int64) * width
    tokens = ranges(layout.response_starts[rows], responses)
    token_ids = sequences.response_token_ids[tokens].astype(np.int64)

    flat = np.zeros(len(rows) * width, dtype=np.int64)
    flat[ranges(row_starts, prompts)] = sequences.prompt_token_ids[
        ranges(layout.prompt_starts[rows], prompts)
    ]
    inputs = ranges(layout.response_starts[rows], responses - 1)
    flat[ranges(row_starts + prompts, responses - 1)] = sequences.response_token_ids[inputs]
    return MicroBatch(
        sequences=rows,
        input_ids=flat.reshape(len(rows), width),
        states=ranges(row_starts + prompts - 1, responses),
        tokens=tokens,
        token_ids=token_ids,
        response_lengths=responses,
    )
