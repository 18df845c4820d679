"""What one output of vLLM says: its tokens, their log-probs, and the sets that they were sampled from."""

from typing import Any

import numpy as np

from asyppo_async.fleet.engine.protocol import Delta, EndOfSample, EngineFault
from asyppo_async.fleet.engine.vllm_versions import VersionReader
from asyppo_async.types import Float32Array, Int32Array, KeptTokens

_ENDS: dict[str, EndOfSample] = {"stop": "stop", "length": "length", "abort": "aborted"}


def delta_of(request_id: str, completion: Any, versions: VersionReader, *, with_kept: bool) -> Delta:
    """What one output of vLLM, of a request that streams, adds to its sample.

    Raises:
        EngineFault: it contradicts itself, or what was said before.
    """
    token_ids = np.array(completion.token_ids, dtype=np.int32)
    logprobs, kept = split_logprobs(completion.logprobs, token_ids, with_kept=with_kept)
    end: EndOfSample | None = None
    if completion.finish_reason is not None:
        if completion.finish_reason not in _ENDS:
            raise EngineFault(f"request {request_id} ended with {completion.finish_reason!r}")
        end = _ENDS[completion.finish_reason]
    return Delta(
        token_ids=token_ids,
        logprobs=logprobs,
        kept=kept,
        runs=versions.take(len(token_ids), completion.weight_versions),
        end=end,
    )


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
