"""Which prompt is drawn next: a lazy permutation per epoch, without memory and without a pause at an epoch's start."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

_NUM_ROUNDS = 8
"""Rounds of the Feistel network; small data sets (a few bits) need more than the usual four to mix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A prompt that the sampler considered."""

    number: int
    """Of candidates before it, since the start of the run."""
    prompt_id: str
    epoch: int
    accepted: bool
    """False: skipped by a selecting sampler; the ledger lists it, and no draw is issued."""
    acceptance: float
    """a: how likely it was to be accepted."""
    success_estimate: float | None
    """p: how likely a response to it is right, as the sampler saw it; None: it has no opinion."""


class Sampler(Protocol):
    """Where draws come from. A selecting sampler considers candidates and accepts some of them."""

    @property
    def num_prompts(self) -> int: ...

    @property
    def num_considered(self) -> int:
        """Candidates considered since the start of the run: the cursor that a checkpoint keeps."""
        ...

    @property
    def exhausted(self) -> bool:
        """Whether the data set is used up."""
        ...

    def next_candidate(self) -> Candidate:
        """The next candidate; not called when `exhausted`."""
        ...

    def seek(self, num_considered: int) -> None:
        """Continue after so many candidates (resume)."""
        ...


class EpochSampler:
    """Every prompt once in each epoch, in an order that depends on (seed, epoch) only.

    Invariant: the candidates `e * N .. (e + 1) * N - 1` are a permutation of the data set.
    The permutation is a Feistel network over the indices with cycle walking (Black and Rogaway, 2002), so that
    nothing is shuffled at the start of an epoch: a shuffle of millions of ids would hold the event loop.
    """

    def __init__(self, *, prompt_ids: Sequence[str], seed: int, num_epochs: int | None) -> None:
        """`num_epochs` None: no end.

        Raises:
            ValueError: no prompts, or an id twice (the ledger would count two prompts as one).
        """
        if not prompt_ids:
            raise ValueError("the data set has no prompts; give at least one")
        if len(set(prompt_ids)) != len(prompt_ids):
            twice = next(prompt for prompt in prompt_ids if prompt_ids.count(prompt) > 1)
            raise ValueError(f"prompt ids must be unique, got {twice!r} more than once")
        self._prompt_ids = tuple(prompt_ids)
        self._seed = seed
        self._num_epochs = num_epochs
        self._num_considered = 0

    @property
    def num_prompts(self) -> int:
        return len(self._prompt_ids)

    @property
    def num_considered(self) -> int:
        return self._num_considered

    def seek(self, num_considered: int) -> None:
        if num_considered < 0:
            raise ValueError(f"a cursor is at least 0, got {num_considered}")
        self._num_considered = num_considered

    @property
    def exhausted(self) -> bool:
        return self._num_epochs is not None and self._num_considered >= self._num_epochs * self.num_prompts

    def next_candidate(self) -> Candidate:
        if self.exhausted:
            raise ValueError(
                f"all {self._num_considered} candidates of {self._num_epochs} epochs are used up"
            )
        number = self._num_considered
        epoch, position = divmod(number, self.num_prompts)
        self._num_considered += 1
        index = permuted_index(position, size=self.num_prompts, key=f"{self._seed}:{epoch}")
        return Candidate(
            number=number,
            prompt_id=self._prompt_ids[index],
            epoch=epoch,
            accepted=True,
            acceptance=1.0,
            success_estimate=None,
        )


def permuted_index(position: int, *, size: int, key: str) -> int:
    """Where `position` goes under the permutation of `range(size)` that `key` names."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    index = position
    while True:
        left, right = index >> half_bits, index & mask
        for round_number in range(_NUM_ROUNDS):
            digest = hashlib.blake2b(f"{key}:{round_number}:{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        index = (left << half_bits) | right
        if index < size:
            return index
