"""Rank 0's end of a weight session, and every rank's part in gathering what is sent."""

from pathlib import Path

from torch._C._distributed_c10d import Store

from asyppo_async.errors import WeightSyncError
from asyppo_async.trainer.worker.backend.protocol import Backend
from asyppo_async.trainer.worker.messages import (
    JoinSession,
    OpenSession,
    SendResult,
    SendWeights,
    SessionStore,
)
from asyppo_async.weights.buckets import plan_buckets
from asyppo_async.weights.manifest import Dtype, Manifest, manifest_of_checkpoint
from asyppo_async.weights.transfer import WeightGroup, open_store, send_tensors


class Sender:
    """At most one session at a time."""

    def __init__(self, backend: Backend, folder: Path, *, dtype: Dtype, bucket_bytes: int, rank: int) -> None:
        """Args:
        backend: holds the tensors.
        folder: of the model as it was loaded; its checkpoint names the tensors.
        dtype: of the bytes on the wire.
        bucket_bytes: largest bucket.
        rank: only rank 0 sends.
        """
        self._backend = backend
        self._rank = rank
        self.manifest: Manifest = manifest_of_checkpoint(folder, dtype)
        self._buckets = plan_buckets(self.manifest, bucket_bytes)
        self._store: Store | None = None
        self._opened: OpenSession | None = None
        self._group: WeightGroup | None = None

    def open(self, request: OpenSession) -> SessionStore:
        self.close()
        store, port = open_store(request.host, request.world_size, request.deadline_s)
        self._store, self._opened = store, request
        return SessionStore(host=request.host, port=port)

    def join(self, request: JoinSession) -> None:
        if self._store is None or self._opened is None or self._opened.epoch != request.epoch:
            raise WeightSyncError(f"there is no open weight session of epoch {request.epoch} to join")
        self._group = WeightGroup.join(
            backend=self._opened.backend,
            store=self._store,
            rank=0,
            world_size=self._opened.world_size,
            epoch=request.epoch,
            deadline_s=request.deadline_s,
            host=self._opened.host,
        )

    def send(self, request: SendWeights) -> SendResult:
        """Send everything; the ranks other than 0 only take part in the gathering."""
        tensors = self._backend.full_tensors([spec.name for spec in self.manifest.tensors])
        if self._rank != 0:
            for _ in tensors:
                pass
            return SendResult(checksums=(), num_bytes=0, gather_s=0.0, wire_s=0.0)
        if self._group is None:
            raise WeightSyncError(f"version {request.version} cannot be sent: no weight session is joined")
        report = send_tensors(self._group, self.manifest, self._buckets, tensors, request.deadline_s)
        return SendResult(
            checksums=report.checksums,
            num_bytes=report.num_bytes,
            gather_s=report.gather_s,
            wire_s=report.wire_s,
        )

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = self._store = self._opened = None
