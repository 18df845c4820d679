"""Versions as files, for servers that share no process group with the trainer: written at one end, pulled at the other.

    FOLDER/RUN-INCARNATION/full-00000012/   index.json, model-00001.safetensors, ...
    FOLDER/RUN-INCARNATION/delta-00000013/  index.json, delta.safetensors

FOLDER is a path, or the URL of an object store. The index of a version is written last: without it nobody sees the
others. It is what a publication over a process group says on the wire: the base of a delta, and the checksum of every
tensor of the version.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save

from asyppo_async.errors import WeightSyncError
from asyppo_async.weights.checksum import checksum_of_bytes
from asyppo_async.weights.folder import Folder
from asyppo_async.weights.host_copy import HostCopy
from asyppo_async.weights.manifest import Manifest
from asyppo_async.weights.transfer import as_tensor, bytes_of, checksums_of, matched

_KEPT_VERSIONS = 2
"""The newest, and the one before it, which a slow reader may have open."""
_DELTA = "delta"
_INDEX = "index.json"
_VERSION = re.compile(r"(full|delta)-\d{8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What the files of one version are."""

    version: int
    base_version: int
    """Of a delta; -1: all tensors are there, whole."""
    checksums: list[int]
    """XXH3-64 of each tensor of the version, in manifest order."""
    files: list[str]
    num_bytes: int
    """Of the files, without their headers."""


def run_folder(folder: str, run_id: str, incarnation: int) -> str:
    """Where one run's versions are below `folder`.

    Raises:
        WeightSyncError: the run's id cannot name a folder.
    """
    name = f"{run_id}-{incarnation}"
    if "/" in name or name.startswith("."):
        raise WeightSyncError(f"the run id {run_id!r} cannot name a folder")
    return f"{folder.rstrip('/')}/{name}"


def write_full(
    folder: str,
    version: int,
    manifest: Manifest,
    tensors: Iterable[tuple[str, torch.Tensor]],
    shard_bytes: int,
) -> Index:
    """Write all tensors, in shards of about `shard_bytes`; one shard is held in memory at a time, and its file."""
    place = _begin(folder, version, is_delta=False)
    checksums: list[int] = []
    files: list[str] = []
    shard: dict[str, torch.Tensor] = {}
    held_bytes = 0

    def flush() -> None:
        files.append(f"model-{len(files) + 1:05}.safetensors")
        place.write(files[-1], save(shard))
        shard.clear()

    for spec, _, tensor in matched(manifest, tensors):
        data = bytes_of(tensor, spec)
        checksums.append(checksum_of_bytes(data))
        if shard and held_bytes + spec.num_bytes > shard_bytes:
            flush()
            held_bytes = 0
        shard[spec.name] = as_tensor(data.clone(), spec)  # a view of the sender's own weights may not be kept
        held_bytes += spec.num_bytes
    flush()
    num_bytes = sum(spec.num_bytes for spec in manifest.tensors)
    index = Index(version=version, base_version=-1, checksums=checksums, files=files, num_bytes=num_bytes)
    return _finish(folder, place, index)


def write_delta(folder: str, base_version: int, copy: HostCopy, delta: NDArray[np.uint8]) -> Index:
    """Write what leads from `base_version` to the version that `copy` holds."""
    if copy.version is None:
        raise AssertionError("a delta leads to a complete version")
    place = _begin(folder, copy.version, is_delta=True)
    files = ["delta.safetensors"]
    place.write(files[0], save({_DELTA: torch.from_numpy(delta.copy())}))
    index = Index(
        version=copy.version,
        base_version=base_version,
        checksums=list(copy.checksums),
        files=files,
        num_bytes=len(delta),
    )
    return _finish(folder, place, index)


def read_version(folder: str, version: int, copy: HostCopy) -> tuple[Index, frozenset[int]]:
    """Pull a version into `copy`: its delta if there is one and the copy holds its base, else all of it.

    Returns:
        The index of what was read, and the indices of the tensors that changed.

    Raises:
        WeightSyncError: the version is not there, or its files are not what the index says; the copy is of no version.
    """
    held = copy.version
    delta = _index_in(_named(folder, version, is_delta=True))
    if delta is not None and held is not None and delta.base_version == held:
        changed = copy.patch(version, _read_delta(_named(folder, version, is_delta=True), delta))
        _check(copy.manifest, delta.checksums, copy.checksums)
        return delta, changed
    full = _index_in(_named(folder, version, is_delta=False))
    if full is None:
        there = "nothing" if delta is None else f"a delta against version {delta.base_version}"
        raise WeightSyncError(
            f"{folder} has {there} of version {version}, this server holds version {held}; is it the trainer's folder?"
        )
    copy.invalidate()
    _read_full(_named(folder, version, is_delta=False), full, copy)
    checksums = checksums_of(copy.manifest, copy.buffer)
    _check(copy.manifest, full.checksums, checksums)
    copy.complete(version, checksums)
    return full, frozenset(range(len(checksums)))


def _read_delta(place: Folder, index: Index) -> NDArray[np.uint8]:
    tensors = _tensors_in(place, index.files[0])
    if _DELTA not in tensors:
        raise WeightSyncError(f"{place}/{index.files[0]} holds no delta")
    delta: NDArray[np.uint8] = tensors[_DELTA].numpy()
    return delta


def _read_full(place: Folder, index: Index, copy: HostCopy) -> None:
    places = {
        spec.name: (spec, offset)
        for spec, offset in zip(copy.manifest.tensors, copy.manifest.offsets, strict=True)
    }
    for name in index.files:
        for tensor_name, tensor in _tensors_in(place, name).items():
            if tensor_name not in places:
                raise WeightSyncError(f"{place}/{name} has a tensor {tensor_name} that nobody announced")
            spec, offset = places[tensor_name]
            if tuple(tensor.shape) != spec.shape:
                raise WeightSyncError(
                    f"{place}/{name} has {tensor_name} {list(tensor.shape)}, announced was {list(spec.shape)}"
                )
            copy.buffer[offset : offset + spec.num_bytes] = bytes_of(tensor, spec)


def _tensors_in(place: Folder, name: str) -> dict[str, torch.Tensor]:
    data = place.read(name)
    if data is None:
        raise WeightSyncError(f"{place}/{name} is not there, though the index names it")
    try:
        return load(data)
    except SafetensorError as error:
        raise WeightSyncError(f"{place}/{name} cannot be read: {error}") from error


def _check(manifest: Manifest, expected: Iterable[int], found: Iterable[int]) -> None:
    pairs = zip(manifest.tensors, expected, found, strict=True)
    wrong = [spec.name for spec, ours, theirs in pairs if ours != theirs]
    if wrong:
        raise WeightSyncError(
            f"the files of {len(wrong)} tensors are not what their index says, the first is {wrong[0]}"
        )


def _named(folder: str, version: int, *, is_delta: bool) -> Folder:
    return Folder.at(folder).inside(f"{'delta' if is_delta else 'full'}-{version:08}")


def _index_in(place: Folder) -> Index | None:
    data = place.read(_INDEX)
    if data is None:
        return None
    try:
        return Index(**json.loads(data))
    except (ValueError, TypeError) as error:
        raise WeightSyncError(f"{place}/{_INDEX} cannot be read: {error}") from error


def _begin(folder: str, version: int, *, is_delta: bool) -> Folder:
    """An empty place for the version."""
    place = _named(folder, version, is_delta=is_delta)
    place.remove()
    place.make()
    return place


def _finish(folder: str, place: Folder, index: Index) -> Index:
    """From here on the version is there; all but the newest go."""
    place.write_whole(_INDEX, json.dumps(asdict(index)).encode())
    run = Folder.at(folder)
    versions = {name: int(name[-8:]) for name in run.names() if _VERSION.fullmatch(name)}
    newest = sorted(set(versions.values()))[-_KEPT_VERSIONS:]
    for name, version in versions.items():
        if version not in newest:
            run.inside(name).remove()
    return index
