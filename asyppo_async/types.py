"""The values that travel between the parts. Torch-free; arrays are numpy and never written after construction.

Legend: `P` prompt tokens, `T` response tokens (all turns), `K` responses of a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

Int16Array = NDArray[np.int16]
Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

FinishReason = Literal["stop", "length"]

_LAST_VERSION = int(np.iinfo(np.int32).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of a data set."""

    id: str
    """Stable over epochs, restarts and machines."""
    task: str
    """Name of the task that made it and that scores its responses."""
    text: str
    """What the model reads, after the chat template. For people and reports; the model gets `token_ids`."""
    token_ids: tuple[int, ...]
    answer: str
    """What the task's reward needs to score a response (gold answer, or a JSON document)."""
    source: str = ""
    """Where the row stands (`FILE:LINE`), for messages; empty for a prompt that was generated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a response is sampled. Every field is sent; nothing is filled in by a server.

    The behaviour log-probs are those of the distribution that these parameters give.
    """

    temperature: float
    """0 is greedy."""
    top_p: float
    """1 is off."""
    top_k: int
    """0 is off."""
    min_tokens: int
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    """Every id that ends a response; it is part of the response and counted in `T`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTokens:
    """The tokens that top-k and top-p left to sample from, position by position."""

    token_ids: Int32Array
    """[sum of counts], the set of each token one after another."""
    counts: Int32Array
    """[T]; each at least 1."""

    def sets(self) -> list[frozenset[int]]:
        """[T] sets of ids."""
        ends = self.counts.cumsum()
        return [
            frozenset(self.token_ids[end - count : end].tolist())
            for end, count in zip(ends, self.counts, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class VersionRuns:
    """The version of the weights that sampled each token of a sample; it is one number for thousands of tokens."""

    runs: tuple[tuple[int, int], ...] = ()
    """(version, number of tokens), one after another. Versions are 31-bit numbers and never fall; no run is empty."""
    num_tokens: int = field(init=False, repr=False, compare=False)
    """`T`"""

    def __post_init__(self) -> None:
        last = total = 0
        for version, num_tokens in self.runs:
            if not last <= version <= _LAST_VERSION:
                raise ValueError(
                    f"versions of a sample are 31-bit numbers and never fall, got runs {self.runs}"
                )
            if num_tokens < 1:
                raise ValueError(f"a run of versions has a token at least, got runs {self.runs}")
            last = version
            total += num_tokens
        object.__setattr__(self, "num_tokens", total)

    @classmethod
    def of(cls, versions: Sequence[int] | Int32Array) -> Self:
        """Args:
        versions: [T]
        """
        flat = np.asarray(versions, dtype=np.int64)
        if not len(flat):
            return cls()
        starts = np.flatnonzero(np.diff(flat, prepend=flat[0] - 1))
        lengths = np.diff(starts, append=len(flat))
        return cls(tuple(zip(flat[starts].tolist(), lengths.tolist(), strict=True)))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Of consecutive parts of one sample, one run a version however many there are.

        Raises:
            ValueError: A version is older than one before it.
        """
        runs: list[tuple[int, int]] = []
        for version, num_tokens in (run for part in parts for run in part.runs):
            before = runs.pop()[1] if runs and runs[-1][0] == version else 0
            runs.append((version, before + num_tokens))
        return cls(tuple(runs))

    @property
    def oldest(self) -> int:
        """Of at least one token."""
        return self.runs[0][0]

    @property
    def newest(self) -> int:
        """Of at least one token."""
        return self.runs[-1][0]

    def per_token(self) -> Int32Array:
        """[T]"""
        versions, lengths = zip(*self.runs, strict=True) if self.runs else ((), ())
        return np.repeat(np.array(versions, dtype=np.int32), lengths)


@dataclass(slots=True, kw_only=True)
class Response:
    """What the fleet generated for one sample: token ids, never text (invariant 1).

    Never written after construction. It is not frozen because that doubles what making one costs, and one is made of
    every response that comes.
    """

    token_ids: Int32Array
    """[T]"""
    behaviour_logprobs: Float32Array
    """[T] log-prob of each token under the distribution that it was sampled from."""
    versions: VersionRuns
    """Of T tokens."""
    finish_reason: FinishReason
    routed_experts: Int16Array | None = None
    """[P + T - 1, layers, experts per token] that the engine used where it fed a token: the prompt and all of the
    response but its last token. None: a dense model, or an engine that does not say."""
    kept: KeptTokens | None = None
    """What each token was sampled from. None: not asked for, or not known of all tokens."""

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.behaviour_logprobs) == self.versions.num_tokens:
            raise ValueError(
                f"a response needs as many log-probs and versions as tokens, got {len(self.token_ids)} tokens, "
                f"{len(self.behaviour_logprobs)} log-probs, {self.versions.num_tokens} versions"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A response with its reward."""

    prompt: Prompt
    draw_id: int
    sample_index: int
    response: Response
    reward: float
    """In [-1, 1]."""
    server: str
    started_s: float
    """Monotonic seconds at which the request was sent."""
    finished_s: float

    @property
    def num_tokens(self) -> int:
        return len(self.response.token_ids)

    @property
    def oldest_version(self) -> int:
        return self.response.versions.oldest


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The responses sampled for one draw of a prompt."""

    draw_id: int
    prompt: Prompt
    admission_version: int
    trajectories: tuple[Trajectory, ...]
    """Up to K; fewer after the loss of a member (`reduced`)."""
    finished_s: float

    @property
    def num_tokens(self) -> int:
        return sum(trajectory.num_tokens for trajectory in self.trajectories)

    @property
    def oldest_version(self) -> int:
        return min(trajectory.oldest_version for trajectory in self.trajectories)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequences:
    """Prompts and responses laid end to end, as the worker groups receive them.

    Per-token results (log-probs, values, ...) come back as one flat array of `sum(response_lengths)` numbers in
    the same order.
    """

    prompt_token_ids: Int32Array
    """[sum P]"""
    prompt_lengths: Int32Array
    """[B]"""
    response_token_ids: Int32Array
    """[sum T]"""
    response_lengths: Int32Array
    """[B]"""

    @property
    def num_sequences(self) -> int:
        return len(self.response_lengths)

    @property
    def num_response_tokens(self) -> int:
        return len(self.response_token_ids)


def concatenate_sequences(pairs: Sequence[tuple[Sequence[int] | Int32Array, Int32Array]]) -> TokenSequences:
    """Lay `(prompt ids, response ids)` pairs end to end."""
    prompts = [np.asarray(prompt, dtype=np.int32) for prompt, _ in pairs]
    responses = [np.asarray(response, dtype=np.int32) for _, response in pairs]
    empty = np.zeros(0, dtype=np.int32)
    return TokenSequences(
        prompt_token_ids=np.concatenate([empty, *prompts]),
        prompt_lengths=np.array([len(ids) for ids in prompts], dtype=np.int32),
        response_token_ids=np.concatenate([empty, *responses]),
        response_lengths=np.array([len(ids) for ids in responses], dtype=np.int32),
    )
