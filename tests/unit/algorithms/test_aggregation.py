import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyppo_async.algorithms.aggregation import MODES, aggregate, denominator, token_weights

F64 = torch.float64
TERMS = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0], dtype=F64)
LENGTHS = torch.tensor([4, 1])


def loss(mode, terms=TERMS, lengths=LENGTHS, counted=None, max_length=8):
    weights = token_weights(mode, lengths, counted, dtype=F64)
    return aggregate(terms, weights, denominator(mode, lengths, counted, max_length=max_length))


@pytest.mark.parametrize("mode", MODES)
def test_aggregation_when_lengths_differ_then_golden(mode, golden, check):
    check(loss(mode), golden["agg_modes"][mode])


def test_aggregation_when_micro_batch_means_are_averaged_then_it_is_not_the_global_mean(golden):
    wrong = (TERMS[:4].mean() + TERMS[4:].mean()) / 2
    assert wrong == golden["microbatch_pitfall"]["mean_of_micro_means"]
    assert loss("token-mean") == golden["microbatch_pitfall"]["global"]


@given(st.permutations(range(4)), st.sampled_from(MODES))
@settings(max_examples=40, deadline=None)
def test_aggregation_when_responses_are_permuted_or_padded_then_same_loss(order, mode):
    rows = [torch.tensor(r, dtype=F64) for r in ([1.0, 2.0], [], [5.0, -1.0, 3.0], [0.5])]
    straight = loss(mode, torch.cat(rows), torch.tensor([2, 0, 3, 1]))
    garbage = torch.full((2,), torch.nan, dtype=F64)
    padded = [torch.cat([rows[i], garbage]) for i in order]
    counted = torch.cat([torch.arange(len(rows[i]) + 2) < len(rows[i]) for i in order])
    lengths = torch.tensor([len(row) for row in padded])
    torch.testing.assert_close(loss(mode, torch.cat(padded), lengths, counted), straight)


@pytest.mark.parametrize("mode", MODES)
def test_aggregation_when_nothing_is_counted_then_zero_and_differentiable(mode):
    terms = torch.full((5,), torch.nan, dtype=F64, requires_grad=True)
    total = loss(mode, terms, counted=torch.zeros(5, dtype=torch.bool))
    total.backward()
    assert total.item() == 0.0
    assert terms.grad.tolist() == [0.0] * 5


def test_denominator_when_renormalised_then_a_rejected_response_still_counts_as_one():
    kept = torch.tensor([True, True, False, False, False])
    assert denominator("seq-mean-token-mean", LENGTHS, kept) == 1
    everything = torch.ones(5, dtype=torch.bool)
    assert denominator("seq-mean-token-mean", LENGTHS, kept, responses_counted=everything) == 2
    assert denominator("token-mean", LENGTHS, kept) == 2


def test_denominator_when_max_length_is_missing_then_says_so():
    with pytest.raises(ValueError, match="needs max_length"):
        denominator("seq-mean-token-sum-norm", LENGTHS)
