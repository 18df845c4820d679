"""The memory that a publication's bytes arrive in, and what of it the engine has not loaded yet.

An anonymous file (`memfd`): the engine's processes map it through /proc, so there is one copy for any number of workers
and no limit of /dev/shm. It outlives its session, so that the next one can send what has changed.
"""

import contextlib
import mmap
import os
from collections.abc import Iterator

import torch

from asyppo_async.errors import WeightSyncError
from asyppo_async.fleet.engine.protocol import StagedWeights
from asyppo_async.fleet.update_state import RunIdentity
from asyppo_async.weights.host_copy import HostCopy
from asyppo_async.weights.manifest import Manifest, leaf_module


class HostMemory:
    def __init__(self, manifest: Manifest) -> None:
        self._file_descriptor = os.memfd_create("asyppo-staged-weights")
        self._num_bytes = max(1, manifest.num_bytes)
        os.ftruncate(self._file_descriptor, self._num_bytes)
        mapped = mmap.mmap(self._file_descriptor, self._num_bytes)
        buffer = torch.frombuffer(mapped, dtype=torch.uint8)[: manifest.num_bytes]
        self.copy = HostCopy(manifest, buffer)
        self._identity: RunIdentity | None = None
        self._unloaded = self._all = frozenset(range(len(manifest.tensors)))
        self.is_written = False
        """By a receive that is under way, perhaps of a session that has ended."""

    @contextlib.contextmanager
    def written_by(self, identity: RunIdentity) -> Iterator[HostCopy]:
        """The copy, for one receive; of another run it holds no version."""
        if identity != self._identity:
            self.copy.invalidate()
        self._identity = identity
        self.is_written = True
        try:
            yield self.copy
        finally:
            self.is_written = False

    def held_version(self, identity: RunIdentity) -> int:
        """What a delta of this run may be against; -1: nothing."""
        version = self.copy.version
        return version if version is not None and identity == self._identity else -1

    def changed(self, indices: frozenset[int]) -> None:
        """These tensors are other ones than before."""
        self._unloaded |= indices

    def loaded(self) -> None:
        """The engine holds what is here."""
        self._unloaded = frozenset()

    def unloaded(self) -> None:
        """Nobody knows what the engine holds."""
        self._unloaded = self._all

    def staged(self, checksums: tuple[int, ...]) -> StagedWeights:
        """What is here, if it is what was sent.

        Raises:
            WeightSyncError: nothing complete is here, or a checksum differs; the message names the tensors.
        """
        manifest, found = self.copy.manifest, self.copy.checksums
        if self.copy.version is None:
            raise WeightSyncError("no complete version is staged")
        if len(checksums) != len(found):
            raise WeightSyncError(f"{len(checksums)} checksums for {len(found)} tensors")
        pairs = zip(manifest.tensors, found, checksums, strict=True)
        wrong = [spec.name for spec, received, sent in pairs if received != sent]
        if wrong:
            raise WeightSyncError(
                f"the bytes of {len(wrong)} tensors differ from those sent: {', '.join(wrong[:5])}"
            )
        return StagedWeights(
            process_id=os.getpid(),
            file_descriptor=self._file_descriptor,
            num_bytes=self._num_bytes,
            manifest=manifest,
            checksums=checksums,
            load_names=self._names_to_load(),
        )

    def close(self) -> None:
        """The memory goes when nobody refers to it."""
        self.copy.invalidate()
        os.close(self._file_descriptor)

    def _names_to_load(self) -> tuple[str, ...]:
        """Whole leaf modules, since the engine packs a module when all of its tensors are there."""
        tensors = self.copy.manifest.tensors
        modules = {leaf_module(tensors[index].name) for index in self._unloaded}
        return tuple(spec.name for spec in tensors if leaf_module(spec.name) in modules)
