"""Micro-batches: every row once, within the budget, and the response slice [P-1 : P+T-1]."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyppo_async.trainer.worker.packing import Cutting, lay_out, plan_documents, plan_rows, ranges
from asyppo_async.types import TokenSequences, concatenate_sequences


@given(
    lengths=st.lists(st.integers(1, 40), max_size=30).map(lambda values: np.array(values, dtype=np.int64)),
    budget=st.integers(1, 100),
)
def test_plan_when_cut_keeps_every_row_once_and_the_budget(
    lengths: np.ndarray[tuple[int], np.dtype[np.int64]], budget: int
) -> None:
    plan = plan_rows(lengths, budget)
    assert sorted(np.concatenate([np.zeros(0, dtype=np.int64), *plan]).tolist()) == list(range(len(lengths)))
    for rows in plan:
        assert len(rows) == 1 or len(rows) * lengths[rows].max() <= budget


@given(
    lengths=st.lists(st.integers(1, 40), max_size=30).map(lambda values: np.array(values, dtype=np.int64)),
    budget=st.integers(1, 100),
)
def test_plan_of_documents_keeps_every_row_once_the_budget_and_fills_up(
    lengths: np.ndarray[tuple[int], np.dtype[np.int64]], budget: int
) -> None:
    plan = plan_documents(lengths, budget)
    assert sorted(np.concatenate([np.zeros(0, dtype=np.int64), *plan]).tolist()) == list(range(len(lengths)))
    sums = [int(lengths[rows].sum()) for rows in plan]
    assert all(total <= budget for total, rows in zip(sums, plan, strict=True) if len(rows) > 1)
    # No two that are within the budget could be one: at most one of them is up to half full.
    assert sum(total <= budget / 2 for total in sums) <= 1


def test_plan_of_documents_by_hand_is_first_fit_decreasing() -> None:
    plan = plan_documents(np.array([3, 9, 5, 5, 2, 12]), 10)
    assert [rows.tolist() for rows in plan] == [[5], [1], [2, 3], [0, 4]]


def test_plan_when_lengths_differ_puts_similar_ones_together() -> None:
    plan = plan_rows(np.array([2, 9, 3, 10]), 20)
    assert [rows.tolist() for rows in plan] == [[3, 1], [2, 0]]


def test_ranges_when_one_is_empty_leaves_it_out() -> None:
    assert ranges(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]


def test_micro_batch_by_hand_holds_the_inputs_and_the_states_before_each_token() -> None:
    sequences = concatenate_sequences(
        [([1, 2], np.array([3, 4, 5], dtype=np.int32)), ([6], np.array([7], dtype=np.int32))]
    )
    (batch,) = Cutting(budget_tokens=100).micro_batches(sequences, lay_out(sequences), np.array([0, 1]))
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], [6, 0, 0, 0]]
    assert batch.states.tolist() == [1, 2, 3, 4]  # P-1 .. P+T-2 of row 0, then column 0 of row 1
    assert batch.token_ids.tolist() == [3, 4, 5, 7]
    assert batch.tokens.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("budget_tokens", [1, 13, 30, 1000])
def test_micro_batches_against_a_loop_predict_each_token_from_the_state_before(
    sequences: TokenSequences, budget_tokens: int, packed: bool
) -> None:
    prompts = np.split(sequences.prompt_token_ids, sequences.prompt_lengths.cumsum()[:-1])
    responses = np.split(sequences.response_token_ids, sequences.response_lengths.cumsum()[:-1])
    seen = np.zeros(sequences.num_response_tokens, dtype=np.int64)
    everything = np.arange(sequences.num_sequences)
    cutting = Cutting(budget_tokens=budget_tokens, packed=packed)
    for batch in cutting.micro_batches(sequences, lay_out(sequences), everything):
        flat = batch.input_ids.reshape(-1)
        assert batch.documents == (tuple(batch.row_lengths) if packed else ())
        assert not packed or flat.size == batch.row_lengths.sum()
        for state, token, token_id in zip(batch.states, batch.tokens, batch.token_ids, strict=True):
            seen[token] += 1
            row = int(np.searchsorted(batch.row_starts, state, side="right")) - 1
            sequence = int(batch.sequences[row])
            step = int(token - sequences.response_lengths[:sequence].sum())
            assert token_id == responses[sequence][step]
            before = np.concatenate([prompts[sequence], responses[sequence][:step]])
            row_start = batch.row_starts[row]
            assert flat[row_start : state + 1].tolist() == before.tolist()
    assert (seen == 1).all()
