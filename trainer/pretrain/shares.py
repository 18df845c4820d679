"""Which critic learns from which trajectory of a pool, and which prompts nobody learns from."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from asyppo_async.algorithms.critic_data import CriticData, critic_responses
from asyppo_async.errors import ConfigError
from asyppo_async.trainer.pool.shards import Entry

MAX_HELDOUT_RESPONSES = 1024
"""On which explained variance is measured; more of them cost a forward each and tell little more."""


def heldout_prompts(prompt_ids: Iterable[str], share: float, seed: int) -> frozenset[str]:
    """That share of the prompts, at least one of several, chosen by hash: the same however they are ordered."""
    ordered = sorted(
        set(prompt_ids), key=lambda prompt: hashlib.blake2b(f"{seed}|{prompt}".encode()).digest()
    )
    num = min(len(ordered) - 1, max(1, round(share * len(ordered))))
    return frozenset(ordered[:num])


def deal(
    entries: Sequence[Entry], *, num_critics: int, data: CriticData, seed: int
) -> tuple[NDArray[np.int64], ...]:
    """For each critic the indices of the entries that it learns from, for the whole of the pretraining.

    Under `group_split` the shares are disjoint inside each prompt, so that every critic sees every prompt that has
    responses enough (`algorithms.md` 4.4).

    Raises:
        ConfigError: A critic would miss a prompt that has at least as many responses as there are critics.
    """
    numbers: dict[str, int] = {}
    place: dict[str, int] = defaultdict(int)
    groups, samples = [], []
    for entry in entries:
        groups.append(numbers.setdefault(entry.prompt_id, len(numbers)))
        samples.append(place[entry.prompt_id])
        place[entry.prompt_id] += 1
    prompts = [entry.prompt_id for entry in entries]
    sees = critic_responses(
        data, prompts, groups, samples, num_critics=num_critics, seed=seed, step=0
    ).numpy()
    for critic in range(num_critics):
        seen = {prompts[index] for index in np.flatnonzero(sees[critic])}
        missed = [prompt for prompt, num in place.items() if num >= num_critics and prompt not in seen]
        if missed:
            raise ConfigError(
                f"critic.data = {data!r} lets critic {critic} miss {len(missed)} prompts that have responses for every "
                f"critic, {missed[0]} first: critics that know different prompts grow apart; use 'group_split'"
            )
    return tuple(np.flatnonzero(row) for row in sees)
