"""Cutting a request into one shard per rank, and putting per-token results together again. Pure."""

from dataclasses import dataclass, replace

import numpy as np

from asyppo_async.trainer.worker.messages import ActorTrain, CriticTrain, MiniBatches
from asyppo_async.trainer.worker.packing import Int64Array, lay_out, ranges
from asyppo_async.types import Float32Array, Int16Array, Int32Array, TokenSequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one rank gets of a batch."""

    sequences: TokenSequences
    tokens: Int64Array
    """Flat indices into the per-token arrays of the whole batch."""
    chosen: Int64Array
    """Indices of the shard's sequences in the whole batch."""

    def select(self, per_token: Float32Array) -> Float32Array:
        return per_token[self.tokens]

    def select_routing(
        self, sequences: TokenSequences, routed_experts: Int16Array | None
    ) -> Int16Array | None:
        """Of the positions that the shard's sequences feed; `sequences` are those of the whole batch."""
        if routed_experts is None:
            return None
        inputs = lay_out(sequences).input_lengths
        starts = inputs.cumsum() - inputs
        return routed_experts[ranges(starts[self.chosen], inputs[self.chosen])]


def balance(costs: Int64Array, num_ranks: int) -> Int64Array:
    """Which rank gets each item, so that the sums of costs are even: the largest first, to the least loaded rank."""
    loads = np.zeros(num_ranks, dtype=np.int64)
    ranks = np.zeros(len(costs), dtype=np.int64)
    for item in np.argsort(-costs, kind="stable"):
        rank = int(loads.argmin())
        ranks[item] = rank
        loads[rank] += costs[item]
    return ranks


def cut_batch(sequences: TokenSequences, num_ranks: int) -> list[Shard]:
    """For a forward: every sequence at exactly one rank, tokens even."""
    if num_ranks == 1:
        everything = np.arange(sequences.num_sequences)
        return [
            Shard(sequences=sequences, tokens=np.arange(sequences.num_response_tokens), chosen=everything)
        ]
    ranks = balance(lay_out(sequences).input_lengths, num_ranks)
    return [_shard(sequences, np.flatnonzero(ranks == rank)) for rank in range(num_ranks)]


def cut_mini_batches(
    sequences: TokenSequences, mini_batches: MiniBatches, num_ranks: int
) -> list[tuple[Shard, MiniBatches]]:
    """For training: the sequences of every mini-batch are dealt evenly, so no step waits for one rank.

    A sequence that falls to different ranks in different passes is sent to each of them. Denominators stay global.
    """
    if num_ranks == 1:
        return [(cut_batch(sequences, 1)[0], mini_batches)]
    costs = lay_out(sequences).input_lengths
    parts: list[list[Int32Array]] = [[] for _ in range(num_ranks)]
    ends = mini_batches.sizes.astype(np.int64).cumsum()
    for end, size in zip(ends, mini_batches.sizes, strict=True):
        chosen = mini_batches.sequence_indices[end - size : end]
        ranks = balance(costs[chosen], num_ranks)
        for rank in range(num_ranks):
            parts[rank].append(chosen[ranks == rank])
    return [_training_shard(sequences, mini_batches, steps) for steps in parts]


def cut_actor_train(request: ActorTrain, num_ranks: int) -> list[ActorTrain]:
    """One training request per rank."""
    return [
        replace(
            request,
            sequences=shard.sequences,
            proximal_logprobs=shard.select(request.proximal_logprobs),
            advantages=shard.select(request.advantages),
            policy_weights=shard.select(request.policy_weights),
            entropy_weights=shard.select(request.entropy_weights),
            counted=None if request.counted is None else request.counted[shard.tokens],
            masked=None if request.masked is None else request.masked[shard.tokens],
            reference_logprobs=None
            if request.reference_logprobs is None
            else shard.select(request.reference_logprobs),
            routed_experts=shard.select_routing(request.sequences, request.routed_experts),
            positives=None
            if request.positives is None
            else replace(request.positives, tokens=request.positives.tokens[shard.tokens]),
            mini_batches=mini_batches,
        )
        for shard, mini_batches in cut_mini_batches(request.sequences, request.mini_batches, num_ranks)
    ]


def cut_critic_train(request: CriticTrain, num_ranks: int) -> list[CriticTrain]:
    """Likewise."""
    return [
        replace(
            request,
            sequences=shard.sequences,
            targets=shard.select(request.targets),
            weights=shard.select(request.weights),
            old_values=shard.select(request.old_values),
            mini_batches=mini_batches,
        )
        for shard, mini_batches in cut_mini_batches(request.sequences, request.mini_batches, num_ranks)
    ]


def merge(shards: list[Shard], results: list[Float32Array], num_tokens: int) -> Float32Array:
    """Per-token results of all ranks in the order of the whole batch."""
    merged = np.full(num_tokens, np.nan, dtype=np.float32)
    for shard, result in zip(shards, results, strict=True):
        merged[shard.tokens] = result
    return merged


def _training_shard(
    sequences: TokenSequences, mini_batches: MiniBatches, steps: list[Int32Array]
) -> tuple[Shard, MiniBatches]:
    indices = np.concatenate([np.zeros(0, dtype=np.int32), *steps])
    present, local = np.unique(indices, return_inverse=True)
    return _shard(sequences, present.astype(np.int64)), MiniBatches(
        sequence_indices=local.astype(np.int32),
        sizes=np.array([len(step) for step in steps], dtype=np.int32),
        denominators=mini_batches.denominators,
    )


def _shard(sequences: TokenSequences, chosen: Int64Array) -> Shard:
    layout = lay_out(sequences)
    prompts = ranges(layout.prompt_starts[chosen], layout.prompt_lengths[chosen])
    tokens = ranges(layout.response_starts[chosen], layout.response_lengths[chosen])
    return Shard(
        sequences=TokenSequences(
            prompt_token_ids=sequences.prompt_token_ids[prompts],
            prompt_lengths=sequences.prompt_lengths[chosen],
            response_token_ids=sequences.response_token_ids[tokens],
            response_lengths=sequences.response_lengths[chosen],
        ),
        tokens=tokens,
        chosen=chosen,
    )
