"""One version of all tensors in host memory: what a delta is made against at one end, and patched into at the other."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from asyppo_async.weights.delta import Patterns, apply_delta, delta_of
from asyppo_async.weights.manifest import Manifest
from asyppo_async.weights.transfer import bytes_of, checksums_of


class HostCopy:
    """The bytes of `manifest` in `buffer` (uint8, [manifest.num_bytes])."""

    def __init__(self, manifest: Manifest, buffer: torch.Tensor) -> None:
        self.manifest = manifest
        self.buffer = buffer
        self.version: int | None = None
        """Whose bytes are complete here; None: they are of no one version."""
        self.checksums: tuple[int, ...] = ()
        """XXH3-64 of each tensor of that version."""

    @classmethod
    def empty(cls, manifest: Manifest) -> "HostCopy":
        return cls(manifest, torch.zeros(manifest.num_bytes, dtype=torch.uint8))

    def invalidate(self) -> None:
        self.version = None

    def complete(self, version: int, checksums: tuple[int, ...]) -> None:
        self.version, self.checksums = version, checksums

    def keeping(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same tensors, in manifest order, each kept as it goes by; `complete` has to follow."""
        self.invalidate()
        places = zip(self.manifest.tensors, self.manifest.offsets, strict=True)
        for name, tensor in tensors:
            spec, offset = next(places, (None, 0))
            if spec is not None and spec.shape == tuple(tensor.shape):  # else the sending says what is wrong
                self.buffer[offset : offset + spec.num_bytes] = bytes_of(tensor, spec)
            yield name, tensor

    def hold(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """All tensors of a version, in manifest order, and their checksums."""
        for _ in self.keeping(tensors):
            pass
        self.complete(version, checksums_of(self.manifest, self.buffer))

    def advance(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> NDArray[np.uint8]:
        """Go on to the next version, in place, and say what that changes.

        Args:
            version: Of the tensors.
            tensors: Name and full tensor, in manifest order.

        Returns:
            The delta, uint8 [n].
        """
        self.invalidate()
        checksums = list(self.checksums)
        parts: list[bytes] = []
        places = zip(self.manifest.tensors, self.manifest.offsets, tensors, strict=True)
        for index, (spec, offset, (_, tensor)) in enumerate(places):
            kept = _patterns(self.buffer[offset : offset + spec.num_bytes])
            fresh = _patterns(bytes_of(tensor, spec))
            delta = delta_of(index, kept, fresh)
            if delta is not None:
                parts.append(delta.packed())
                checksums[index] = delta.checksum
                kept[:] = fresh
        self.complete(version, tuple(checksums))
        return np.frombuffer(b"".join(parts), dtype=np.uint8)

    def patch(self, version: int, delta: NDArray[np.uint8]) -> frozenset[int]:
        """Apply a delta in place; the indices of the tensors that it changed.

        Raises:
            WeightSyncError: the result is not what the sender has; the copy is of no version then.
        """
        self.invalidate()
        changed = apply_delta(self.manifest, self.buffer, delta)
        checksums = list(self.checksums)
        for index, checksum in changed.items():
            checksums[index] = checksum
        self.complete(version, tuple(checksums))
        return frozenset(changed)

    def verify(self) -> bool:
        """Whether the bytes are still those that the checksums were taken of."""
        return checksums_of(self.manifest, self.buffer) == self.checksums


def _patterns(data: torch.Tensor) -> Patterns:
    patterns: Patterns = data.numpy().view(np.uint16)
    return patterns
