"""What the arrays of a request must fit: lengths that add up, one entry per token or per position that is fed."""

import numpy as np

from asyppo_async.types import BoolArray, Float32Array, Int16Array, TokenSequences


def check_sequences(sequences: TokenSequences) -> None:
    """Refuse what no forward could be right about: lengths that do not add up, a prompt or response of nothing."""
    prompts, responses = sequences.prompt_lengths, sequences.response_lengths
    if len(prompts) != len(responses):
        raise ValueError(f"{len(prompts)} prompt lengths but {len(responses)} response lengths")
    for what, lengths, tokens in (
        ("prompt", prompts, sequences.prompt_token_ids),
        ("response", responses, sequences.response_token_ids),
    ):
        if len(lengths) and int(lengths.min()) < 1:
            raise ValueError(f"every {what} needs at least one token, got a length of {int(lengths.min())}")
        if int(lengths.sum(dtype=np.int64)) != len(tokens):
            raise ValueError(
                f"{what} lengths sum to {int(lengths.sum(dtype=np.int64))}, got {len(tokens)} tokens"
            )


def check_routing(sequences: TokenSequences, routed_experts: Int16Array | None) -> None:
    """One choice of experts for every position that a forward feeds."""
    if routed_experts is None:
        return
    num_inputs = len(sequences.prompt_token_ids) + sequences.num_response_tokens - sequences.num_sequences
    if routed_experts.ndim != 3 or len(routed_experts) != num_inputs:
        raise ValueError(
            f"routed_experts must be [{num_inputs} positions, layers, experts per token] for these sequences, "
            f"got shape {list(routed_experts.shape)}"
        )


def check_per_token(sequences: TokenSequences, **arrays: Float32Array | BoolArray | None) -> None:
    """One number for every response token; None is not looked at."""
    for name, values in arrays.items():
        if values is not None and values.shape != (sequences.num_response_tokens,):
            raise ValueError(
                f"{name} must have one number for each of {sequences.num_response_tokens} response tokens, "
                f"got shape {list(values.shape)}"
            )
