"""A pool as pretraining and `pool info` read it: every shard's index in memory, tokens when they are asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyppo_async.errors import ConfigError
from asyppo_async.trainer.pool.shards import SUFFIX, Entry, Shard, Vocabulary, read_index
from asyppo_async.types import Trajectory


@dataclass(slots=True)
class Pool:
    folder: Path
    vocabulary: Vocabulary
    entries: tuple[Entry, ...]
    """In the order of shards and rows."""
    _shards: dict[Path, Shard] = field(default_factory=dict)

    def read(self, entries: Sequence[Entry]) -> list[Trajectory]:
        """The trajectories of these entries, in this order."""
        for entry in entries:
            if entry.shard not in self._shards:
                self._shards[entry.shard] = Shard(entry.shard)
        return [self._shards[entry.shard].trajectory(entry.row) for entry in entries]

    def check(self, vocabulary: Vocabulary, reader: Path) -> None:
        """Raise `ConfigError` unless a model with that vocabulary, in the folder `reader`, can read the pool."""
        if self.vocabulary != vocabulary:
            own, other = self.vocabulary, vocabulary
            raise ConfigError(
                f"the pool {self.folder} holds ids of another tokenizer ({own.tokenizer_fingerprint}, {own.size} "
                f"tokens) than {reader} reads ({other.tokenizer_fingerprint}, {other.size} tokens); collect one with "
                "that model"
            )


def open_pool(folder: Path) -> Pool:
    """Read the index of every shard.

    Raises:
        ConfigError: There is no pool, it is empty, a shard is broken, or shards are of different tokenizers.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no pool {folder}; `asyppo-train pool collect CONFIG` makes one")
    found = [read_index(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]
    entries = tuple(entry for _, rows in found for entry in rows)
    if not entries:
        raise ConfigError(
            f"the pool {folder} is empty: collect into it with `asyppo-train pool collect CONFIG`, or let a run add to "
            "it with --set pool.save=true"
        )
    vocabularies = {vocabulary for vocabulary, _ in found}
    if len(vocabularies) > 1:
        prints = ", ".join(sorted(one.tokenizer_fingerprint for one in vocabularies))
        raise ConfigError(
            f"the pool {folder} mixes shards of several tokenizers ({prints}): keep one pool for each"
        )
    return Pool(folder, vocabularies.pop(), entries)


def check_both_verdicts(pool: Pool) -> None:
    """Raise `ConfigError` for a pool from which no critic can learn a difference."""
    right = sum(entry.is_right for entry in pool.entries)
    if right in (0, len(pool.entries)):
        verdict = "right" if right else "wrong"
        raise ConfigError(
            f"all {len(pool.entries)} trajectories of the pool {pool.folder} are {verdict}: a critic would learn one "
            "constant; collect from weaker and from stronger policies, or from other prompts"
        )
