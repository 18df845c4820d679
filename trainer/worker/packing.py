"""Micro-batches within a budget of tokens: rows of similar length, right-padded, or rows packed end to end.

Right padding under a causal mask needs no attention mask: no token of a row sees the padding behind it. Packed rows
have no padding, and need an attention that knows where each ends (`documents`).

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
    """[R, L], or packed [1, sum of row lengths]; the last response token is left out, since nothing is asked of the
    state after it."""
    row_starts: Int64Array
    """[R] flat indices into `input_ids`."""
    row_lengths: Int64Array
    """[R] P + T - 1"""
    packed: bool
    states: Int64Array
    """[N] flat indices into `input_ids`: the slice `[P-1 : P+T-1]` of every row (`algorithms.md` 0.1)."""
    tokens: Int64Array
    """[N] flat indices into the per-token arrays of the request."""
    token_ids: Int64Array
    """[N]"""
    response_lengths: Int64Array
    """[R]"""

    @property
    def documents(self) -> tuple[int, ...]:
        """Lengths of the rows that lie end to end in one; empty where rows are rows."""
        return tuple(self.row_lengths.tolist()) if self.packed else ()

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """How a request is cut into micro-batches."""

    budget_tokens: int
    """Of one micro-batch, padding included; a longer row is one of its own."""
    packed: bool = False
    """Rows lie end to end, which the model must have been prepared for."""

    def plan(self, lengths: Int64Array) -> list[Int64Array]:
        """Micro-batches as indices into the `lengths` of rows; every row is in exactly one, longest first."""
        return (plan_documents if self.packed else plan_rows)(lengths, self.budget_tokens)

    def micro_batches(
        self, sequences: TokenSequences, layout: RowLayout, chosen: Int64Array
    ) -> Iterator[MicroBatch]:
        """Of the `chosen` sequences (indices; one that is chosen twice is two rows)."""
        for rows in self.plan(layout.input_lengths[chosen]):
            yield _fill(sequences, layout, chosen[rows], packed=self.packed)


def plan_documents(lengths: Int64Array, budget_tokens: int) -> list[Int64Array]:
    """First fit decreasing: each row, longest first, into the first micro-batch that has room for it.

    Args:
        lengths: [B] input tokens of each row.
        budget_tokens: sum of the lengths in a micro-batch.
    """
    order = np.argsort(-lengths, kind="stable")
    room = np.zeros(len(lengths), dtype=np.int64)
    plan: list[list[int]] = []
    for row in order:
        fits = room[: len(plan)] >= lengths[row]
        place = int(fits.argmax()) if fits.any() else len(plan)
        if place == len(plan):
            plan.append([])
            room[place] = budget_tokens
        plan[place].append(int(row))
        room[place] -= lengths[row]
    return [np.array(rows, dtype=np.int64) for rows in plan]


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


def ranges(starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """`starts[i], starts[i] + 1, ...` for `lengths[i]` numbers each, end to end."""
    offsets: Int64Array = np.repeat(starts - (lengths.cumsum() - lengths), lengths)
    return np.arange(len(offsets), dtype=np.int64) + offsets


def _fill(sequences: TokenSequences, layout: RowLayout, rows: Int64Array, *, packed: bool) -> MicroBatch:
    prompts, responses = layout.prompt_lengths[rows], layout.response_lengths[rows]
    lengths = layout.input_lengths[rows]
    num_rows, width = (1, int(lengths.sum())) if packed else (len(rows), int(lengths.max()))
    row_starts = lengths.cumsum() - lengths if packed else np.arange(num_rows, dtype=np.int64) * width
    tokens = ranges(layout.response_starts[rows], responses)
    token_ids = sequences.response_token_ids[tokens].astype(np.int64)

    flat = np.zeros(num_rows * width, dtype=np.int64)
    flat[ranges(row_starts, prompts)] = sequences.prompt_token_ids[
        ranges(layout.prompt_starts[rows], prompts)
    ]
    inputs = ranges(layout.response_starts[rows], responses - 1)
    flat[ranges(row_starts + prompts, responses - 1)] = sequences.response_token_ids[inputs]
    return MicroBatch(
        sequences=rows,
        input_ids=flat.reshape(num_rows, width),
        row_starts=row_starts,
        row_lengths=lengths,
        packed=packed,
        states=ranges(row_starts + prompts - 1, responses),
        tokens=tokens,
        token_ids=token_ids,
        response_lengths=responses,
    )
