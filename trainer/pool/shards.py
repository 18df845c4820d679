"""One shard of a pool: a safetensors file whose header is its index, so that the two cannot disagree.

Tensors: prompt_ids [sum P] and response_ids [sum T] int32, prompt_lengths, response_lengths, sample_indices [B] int32,
logprobs [sum T] float32, versions [sum T] int32, rewards [B] float32, truncated [B] bool. The header names the format,
the tokenizer, and of each row its prompt, task and policy. A shard appears whole or not at all; one that is written
again replaces itself.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from asyppo_async.errors import ConfigError
from asyppo_async.types import Float32Array, Int32Array, Prompt, Response, Trajectory, VersionRuns

FORMAT = "asyppo-pool-1"
SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Whose token ids a pool holds."""

    tokenizer_fingerprint: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """A trajectory and the policy that it is of."""

    trajectory: Trajectory
    policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What the index says of one trajectory."""

    shard: Path
    row: int
    prompt_id: str
    task: str
    policy: str
    reward: float
    num_tokens: int

    @property
    def is_right(self) -> bool:
        return self.reward >= 1


def write_shard(path: Path, rows: Sequence[Pooled], vocabulary: Vocabulary) -> None:
    """Write `path`, in place of an older shard of that name.

    Raises:
        OSError: It cannot be written; nothing of it is left.
    """
    trajectories = [row.trajectory for row in rows]
    responses = [one.response for one in trajectories]
    tensors: dict[str, NDArray[np.generic]] = {
        "prompt_ids": np.concatenate([np.array(one.prompt.token_ids, np.int32) for one in trajectories]),
        "prompt_lengths": np.array([len(one.prompt.token_ids) for one in trajectories], np.int32),
        "response_ids": np.concatenate([one.token_ids for one in responses]),
        "response_lengths": np.array([len(one.token_ids) for one in responses], np.int32),
        "logprobs": np.concatenate([one.behaviour_logprobs for one in responses]),
        "versions": np.concatenate([one.versions.per_token() for one in responses]),
        "rewards": np.array([one.reward for one in trajectories], np.float32),
        "truncated": np.array([one.finish_reason == "length" for one in responses], np.bool_),
        "sample_indices": np.array([one.sample_index for one in trajectories], np.int32),
    }
    header = {
        "format": FORMAT,
        "tokenizer": vocabulary.tokenizer_fingerprint,
        "vocab_size": str(vocabulary.size),
        "rows": json.dumps(
            [[row.trajectory.prompt.id, row.trajectory.prompt.task, row.policy] for row in rows]
        ),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".partial")
    try:
        save_file(tensors, unfinished, metadata=header)
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(f"{path} cannot be written: {error}") from error
    os.replace(unfinished, path)


def read_index(path: Path) -> tuple[Vocabulary, list[Entry]]:
    """What a shard holds, without its tokens.

    Raises:
        ConfigError: It is no shard, or a broken one.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            header: Mapping[str, str] = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise ConfigError(f"{path} is no shard of a pool: its format is {header.get('format')!r}")
            rewards = file.get_tensor("rewards").tolist()
            lengths = file.get_tensor("response_lengths").tolist()
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; take it out of the pool") from error
    rows = json.loads(header["rows"])
    vocabulary = Vocabulary(tokenizer_fingerprint=header["tokenizer"], size=int(header["vocab_size"]))
    return vocabulary, [
        Entry(
            shard=path,
            row=row,
            prompt_id=prompt_id,
            task=task,
            policy=policy,
            reward=reward,
            num_tokens=num_tokens,
        )
        for row, ((prompt_id, task, policy), reward, num_tokens) in enumerate(
            zip(rows, rewards, lengths, strict=True)
        )
    ]


class _Slices(Protocol):
    def __getitem__(self, rows: slice) -> Int32Array: ...


class _File(Protocol):
    """What safetensors gives without types."""

    def metadata(self) -> Mapping[str, str]: ...

    def get_tensor(self, name: str) -> NDArray[np.generic]: ...

    def get_slice(self, name: str) -> _Slices: ...


class Shard:
    """An open shard; only the rows that are asked for are read."""

    def __init__(self, path: Path) -> None:
        self._file = cast(_File, safe_open(path, framework="numpy"))
        header: Mapping[str, str] = self._file.metadata()
        self._rows: list[list[str]] = json.loads(header["rows"])
        get = self._file.get_tensor
        self._prompt_ends = np.cumsum(get("prompt_lengths"), dtype=np.int64)
        self._response_ends = np.cumsum(get("response_lengths"), dtype=np.int64)
        self._rewards, self._truncated = get("rewards"), get("truncated")
        self._samples = get("sample_indices")

    def trajectory(self, row: int) -> Trajectory:
        """Of that row; the texts of its prompt and response are not kept."""
        prompt_id, task, _ = self._rows[row]
        tokens = _slice(self._response_ends, row)
        ids = self._file.get_slice("prompt_ids")[_slice(self._prompt_ends, row)]
        return Trajectory(
            prompt=Prompt(id=prompt_id, task=task, text="", token_ids=tuple(ids.tolist()), answer=""),
            draw_id=row,
            sample_index=int(self._samples[row]),
            response=Response(
                token_ids=self._file.get_slice("response_ids")[tokens],
                behaviour_logprobs=cast(Float32Array, self._file.get_slice("logprobs")[tokens]),
                versions=VersionRuns.of(self._file.get_slice("versions")[tokens]),
                finish_reason="length" if self._truncated[row] else "stop",
            ),
            reward=float(self._rewards[row]),
            server="pool",
            started_s=0.0,
            finished_s=0.0,
        )


def _slice(ends: NDArray[np.int64], row: int) -> slice:
    return slice(int(ends[row - 1]) if row else 0, int(ends[row]))
