"""Shards: every sequence of every mini-batch at exactly one rank, even in tokens, and results back in order."""

import numpy as np
import pytest

from asyppo_async.trainer.worker.messages import MiniBatches
from asyppo_async.trainer.worker.packing import lay_out
from asyppo_async.trainer.worker.sharding import (
    balance,
    cut_actor_train,
    cut_batch,
    cut_mini_batches,
    merge,
)
from asyppo_async.types import TokenSequences
from tests.unit.worker.learners import actor_request, random_sequences

BATCH = random_sequences(31, 40)


def fingerprints(sequences: TokenSequences) -> list[tuple[int, ...]]:
    """Each sequence as its token ids, the prompt's end marked."""
    prompts = np.split(sequences.prompt_token_ids, sequences.prompt_lengths.cumsum()[:-1])
    responses = np.split(sequences.response_token_ids, sequences.response_lengths.cumsum()[:-1])
    return [(*prompt, -1, *response) for prompt, response in zip(prompts, responses, strict=True)]


def test_balance_by_hand_gives_the_largest_first_to_the_least_loaded() -> None:
    assert balance(np.array([5, 9, 4, 3]), 2).tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_batch_when_cut_and_merged_is_in_its_order(num_ranks: int) -> None:
    shards = cut_batch(BATCH, num_ranks)
    sent = [item for shard in shards for item in fingerprints(shard.sequences)]
    assert sorted(sent) == sorted(fingerprints(BATCH))
    numbers = np.arange(BATCH.num_response_tokens, dtype=np.float32)
    results = [shard.select(numbers) for shard in shards]
    np.testing.assert_array_equal(merge(shards, results, len(numbers)), numbers)
    for shard in shards:
        np.testing.assert_array_equal(
            shard.sequences.response_token_ids, BATCH.response_token_ids[shard.tokens]
        )
    costs = [int(lay_out(shard.sequences).input_lengths.sum()) for shard in shards]
    assert max(costs) - min(costs) <= int(lay_out(BATCH).input_lengths.max())


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_mini_batch_is_dealt_evenly_and_completely(num_ranks: int) -> None:
    random = np.random.default_rng(0)
    sizes = np.array([15, 25, 0, 1, 39], dtype=np.int32)
    indices = np.concatenate([random.permutation(40), random.permutation(40)]).astype(np.int32)
    mini_batches = MiniBatches(sequence_indices=indices, sizes=sizes, denominators=np.arange(5.0))
    parts = cut_mini_batches(BATCH, mini_batches, num_ranks)
    whole = fingerprints(BATCH)
    longest = int(lay_out(BATCH).input_lengths.max())
    for step in range(5):
        expected = [whole[index] for index in indices[sizes[:step].sum() : sizes[: step + 1].sum()]]
        dealt, costs = [], []
        for shard, part in parts:
            start = part.sizes[:step].sum()
            chosen = part.sequence_indices[start : start + part.sizes[step]]
            mine = fingerprints(shard.sequences)
            dealt += [mine[index] for index in chosen]
            costs.append(int(lay_out(shard.sequences).input_lengths[chosen].sum()))
        assert sorted(dealt) == sorted(expected)
        assert max(costs) - min(costs) <= longest
    for _, part in parts:
        np.testing.assert_array_equal(part.denominators, mini_batches.denominators)


def test_what_is_said_of_each_token_goes_with_it_to_its_rank() -> None:
    marked = np.random.default_rng(4).random(BATCH.num_response_tokens) < 0.5
    request = actor_request(BATCH, [40], masked=marked, counted=~marked)
    sent = []
    for shard in cut_actor_train(request, 3):
        assert shard.masked is not None and shard.counted is not None
        assert not (shard.masked & shard.counted).any()
        sent += list(zip(shard.advantages.tolist(), shard.masked.tolist(), strict=True))
    assert sorted(sent) == sorted(zip(request.advantages.tolist(), marked.tolist(), strict=True))


def test_more_ranks_than_sequences_leave_some_with_nothing() -> None:
    batch = random_sequences(1, 2)
    shards = cut_batch(batch, 4)
    assert sorted(shard.sequences.num_sequences for shard in shards) == [0, 0, 1, 1]
    mini_batches = MiniBatches(
        sequence_indices=np.array([1], dtype=np.int32),
        sizes=np.array([1], dtype=np.int32),
        denominators=np.array([2.0]),
    )
    parts = cut_mini_batches(batch, mini_batches, 4)
    assert [part.sizes.tolist() for _, part in parts] == [[1], [0], [0], [0]]
