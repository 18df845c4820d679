import pytest
import torch

from asyppo_async.algorithms.alignment import response_rows, response_token_positions, start_rows
from asyppo_async.algorithms.logprobs import token_logprobs_and_entropy

PROMPTS = torch.tensor([2, 1, 3])
RESPONSES = torch.tensor([3, 0, 2])


def test_rows_when_sequences_are_packed_then_one_before_the_tokens():
    # Packed: p p y y y | p | p p p y y
    assert response_rows(PROMPTS, RESPONSES).tolist() == [1, 2, 3, 8, 9]
    assert response_token_positions(PROMPTS, RESPONSES).tolist() == [2, 3, 4, 9, 10]
    assert start_rows(PROMPTS, RESPONSES).tolist() == [1, 5, 8]


def test_logprobs_when_rows_are_taken_then_equal_a_loop_over_prefixes_and_a_shift_does_not():
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(7, 7, 7, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, 7, (11,), generator=generator)
    starts, totals = [0, 5, 6], [5, 1, 5]

    def logits_after(previous, last):
        return table[previous, last]

    # A toy model whose logits depend on the two last tokens of the same sequence (0 before its start).
    rows = []
    for start, total in zip(starts, totals, strict=True):
        sequence = ids[start : start + total].tolist()
        rows += [logits_after(sequence[p - 1] if p else 0, sequence[p]) for p in range(total)]
    hidden, head = torch.stack(rows), torch.eye(7, dtype=torch.float64)
    expected = []
    for start, prompt, response in zip(starts, PROMPTS.tolist(), RESPONSES.tolist(), strict=True):
        sequence = ids[start : start + prompt + response].tolist()
        for t in range(response):
            state = sequence[: prompt + t]
            logits = logits_after(state[-2] if len(state) > 1 else 0, state[-1])
            expected.append(torch.log_softmax(logits, -1)[sequence[prompt + t]])
    wanted = torch.stack(expected)
    tokens = ids[response_token_positions(PROMPTS, RESPONSES)]
    states = response_rows(PROMPTS, RESPONSES)

    def scored(index):
        return token_logprobs_and_entropy(
            hidden[index], head, tokens, temperature=1.0, chunk_tokens=2
        ).logprobs

    torch.testing.assert_close(scored(states), wanted)
    assert not torch.allclose(scored(states + 1), wanted, atol=1e-2)
    assert not torch.allclose(scored(states - 1), wanted, atol=1e-2)


def test_rows_when_a_prompt_is_empty_then_says_so():
    with pytest.raises(ValueError, match="at least one token"):
        response_rows(torch.tensor([0]), torch.tensor([2]))
