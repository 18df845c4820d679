"""What vLLM's flat log-probs say of the tokens of one output: their own, and the sets that they were sampled from."""

from typing import Any

import numpy as np

from asyppo_async.fleet.engine.protocol import EngineFault
from asyppo_async.types import Float32Array, Int32Array, KeptTokens


def split_logprobs(
    flat: Any, token_ids: Int32Array, *, with_kept: bool
) -> tuple[Float32Array, KeptTokens | None]:
    """Log-probs of the sampled tokens, and where asked for the tokens that were kept.

    Each position holds the sampled token first, then, where asked for, the `top_k` most likely of the processed
    distribution, the sampled one among them; what was cut off has probability 0.

    Args:
        flat: vLLM's `FlatLogprobs` of this output.
        token_ids: [n] sampled.
        with_kept: Whether the request asked for kept tokens.

    Raises:
        EngineFault: the entries are not those of the sampled tokens.
    """
    if not len(token_ids):
        empty = KeptTokens(token_ids=np.zeros(0, np.int32), counts=np.zeros(0, np.int32))
        return np.zeros(0, np.float32), empty if with_kept else None
    if flat is None or len(flat.start_indices) != len(token_ids):
        raise EngineFault(f"{len(token_ids)} tokens without as many log-probs")
    starts = np.array(flat.start_indices)
    ids = np.array(flat.token_ids, dtype=np.int32)
    logprobs = np.array(flat.logprobs, dtype=np.float32)
    if not np.array_equal(ids[starts], token_ids):
        raise EngineFault("the log-probs are not those of the sampled tokens")
    if not with_kept:
        return logprobs[starts], None
    again = ids == np.repeat(token_ids, np.diff(starts, append=len(ids)))
    again[starts] = False
    kept = (
        np.isfinite(logprobs) & ~again
    )  # the sampled token comes once, though it is among the most likely too
    counts = np.add.reduceat(kept.astype(np.int32), starts)
    return logprobs[starts], KeptTokens(token_ids=ids[kept], counts=counts.astype(np.int32))
