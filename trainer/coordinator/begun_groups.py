"""What has arrived of the groups that are under way, as arrays in a file: a resumed run goes on from it.

At a cut these tokens are of versions that the checkpoint's lineage has, so none of them is rolled back with the steps
behind it. Legend: `G` groups, `S` samples with at least one token, `T` tokens of all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyppo_async.errors import CheckpointError
from asyppo_async.rpc.calls import ResponseParts
from asyppo_async.rpc.codec import SampleTokens, joined
from asyppo_async.trainer.coordinator.flat_arrays import flat, routed_of, routed_shapes
from asyppo_async.types import FinishReason, VersionRuns

_ENDS: tuple[FinishReason | None, ...] = (None, "stop", "length")


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunGroup:
    """Of one draw that is in flight."""

    draw_id: int
    samples: tuple[tuple[SampleTokens, ...], ...]
    """The chunks of each sample of which some have come."""


def begun_group(draw_id: int, parts: ResponseParts) -> BegunGroup | None:
    """None: nothing has come, or a member is lost, which another attempt may save."""
    if parts.failures or not parts.num_tokens:
        return None
    return BegunGroup(draw_id=draw_id, samples=parts.arrived())


def write_begun(path: Path, groups: Sequence[BegunGroup]) -> None:
    """`[G]`, `[S]` and `[T]` arrays, nothing else."""
    rows = [joined(chunks) for group in groups for chunks in group.samples]
    np.savez(
        path,
        draw_ids=np.array([group.draw_id for group in groups], dtype=np.int64),
        group_sizes=np.array([len(group.samples) for group in groups], dtype=np.int64),
        sample_indices=np.array([row.sample_index for row in rows], dtype=np.int64),
        ends=np.array([_ENDS.index(row.finish_reason) for row in rows], dtype=np.int8),
        lengths=np.array([len(row.token_ids) for row in rows], dtype=np.int64),
        token_ids=flat([row.token_ids for row in rows], np.int32),
        logprobs=flat([row.behaviour_logprobs for row in rows], np.float32),
        versions=flat([row.versions.per_token() for row in rows], np.int32),
        routed_shapes=routed_shapes([row.routed_experts for row in rows]),
        routed=flat([row.routed_experts for row in rows], np.int16),
    )


def read_begun(path: Path) -> dict[int, tuple[SampleTokens, ...]]:
    """By draw, one joined chunk of each sample; nothing where there is no such file.

    Raises:
        CheckpointError: The file is not one of these.
    """
    if not path.exists():  # of a run that was saved before partial responses were
        return {}
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        samples = _samples(arrays)
        ends = np.cumsum(arrays["group_sizes"])
        pairs = zip(arrays["draw_ids"], ends, arrays["group_sizes"], strict=True)
        return {int(draw_id): tuple(samples[end - size : end]) for draw_id, end, size in pairs}
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise CheckpointError(f"{path} holds no begun groups: {error}") from error


def _samples(arrays: Mapping[str, NDArray[Any]]) -> list[SampleTokens]:
    samples = []
    routed = routed_of(arrays["routed"], arrays["routed_shapes"])
    ends = np.cumsum(arrays["lengths"])
    for row, (end, length) in enumerate(zip(ends, arrays["lengths"], strict=True)):
        tokens = slice(end - length, end)
        samples.append(
            SampleTokens(
                sample_index=int(arrays["sample_indices"][row]),
                token_ids=arrays["token_ids"][tokens],
                behaviour_logprobs=arrays["logprobs"][tokens],
                versions=VersionRuns.of(arrays["versions"][tokens]),
                finish_reason=_ENDS[arrays["ends"][row]],
                routed_experts=routed[row],
            )
        )
    return samples
