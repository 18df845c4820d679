"""What is scored by engine and trainer after every publication, and how far apart the two are."""

from dataclasses import dataclass

import numpy as np

from asyppo_async.types import Float32Array, Int32Array

_SHORTEST = 2
_SHORT = 17


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeGap:
    """|engine log-prob - trainer log-prob| over the tokens of a probe, in nats."""

    mean: float
    """Infinite if any log-prob of either side is not finite."""
    max: float
    num_tokens: int


NOT_PROBED = ProbeGap(mean=0.0, max=0.0, num_tokens=0)


def fixed_sequences(seed: int, vocab_size: int, kv_block_tokens: int, max_len: int) -> list[Int32Array]:
    """Random sequences of 2 tokens, of 17, and of one more than a KV block; none longer than `max_len`.

    They are the same for one seed everywhere, and touch the shortest prefill, an odd length and a block boundary.
    """
    if vocab_size < 1 or max_len < _SHORTEST:
        raise ValueError(f"a probe needs tokens and room, got vocabulary {vocab_size}, longest {max_len}")
    generator = np.random.default_rng(seed)
    lengths = sorted({min(length, max_len) for length in (_SHORTEST, _SHORT, kv_block_tokens + 1)})
    return [generator.integers(0, vocab_size, size=length, dtype=np.int32) for length in lengths]


def long_sequence(seed: int, vocab_size: int, length: int) -> Int32Array:
    """A random sequence of `length` tokens: what only many positions, or many KV blocks, can show."""
    # A stream of its own, or it would begin as the fixed sequences do.
    return np.random.default_rng([seed, length]).integers(0, vocab_size, size=length, dtype=np.int32)


def compare(engine_logprobs: Float32Array, trainer_logprobs: Float32Array) -> ProbeGap:
    """The gap between two arrays of the same tokens, [N] each."""
    if engine_logprobs.shape != trainer_logprobs.shape:
        raise ValueError(
            f"the two sides scored different tokens: engine {engine_logprobs.shape}, "
            f"trainer {trainer_logprobs.shape}"
        )
    if not engine_logprobs.size:
        return NOT_PROBED
    finite = np.isfinite(engine_logprobs) & np.isfinite(trainer_logprobs)
    if not finite.all():
        return ProbeGap(mean=float("inf"), max=float("inf"), num_tokens=engine_logprobs.size)
    gaps = np.abs(engine_logprobs.astype(np.float64) - trainer_logprobs.astype(np.float64))
    return ProbeGap(mean=float(gaps.mean()), max=float(gaps.max()), num_tokens=engine_logprobs.size)
