"""Rank 0's end of a weight session, and every rank's part in gathering what is sent."""

import time
from collections.abc import Iterator

import torch
from torch._C._distributed_c10d import Store

from asyppo_async.errors import WeightSyncError
from asyppo_async.trainer.worker.published import Published
from asyppo_async.trainer.worker.session_messages import (
    JoinSession,
    OpenSession,
    SendResult,
    SendWeights,
    SessionStore,
)
from asyppo_async.weights.buckets import plan_buckets
from asyppo_async.weights.delta_wire import send_delta
from asyppo_async.weights.host_copy import HostCopy
from asyppo_async.weights.shards import write_delta, write_full
from asyppo_async.weights.store import open_store
from asyppo_async.weights.transfer import WeightGroup, send_tensors, tensors_in

_LARGEST_DELTA_SHARE = 0.5
"""A delta beyond this share of all bytes is not worth its arithmetic: everything is sent."""

Tensors = Iterator[tuple[str, torch.Tensor]]


class Sender:
    """At most one session at a time."""

    def __init__(self, weights: Published, *, bucket_bytes: int, rank: int) -> None:
        """Args:
        weights: what is sent.
        bucket_bytes: largest bucket.
        rank: only rank 0 sends.
        """
        self._weights = weights
        self._rank = rank
        self.manifest = weights.manifest
        self._bucket_bytes = bucket_bytes
        self.buckets = plan_buckets(self.manifest, bucket_bytes)
        self._copy: HostCopy | None = None
        """Of what was sent last, where that is kept."""
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
        """Send everything, or what has changed; the ranks other than 0 only take part in the gathering."""
        tensors = self._weights.tensors(here=self._rank == 0)
        if self._rank != 0:
            for _ in tensors:
                pass
            return SendResult(checksums=(), num_bytes=0, gather_s=0.0, wire_s=0.0)
        if self._group is None and not request.folder:
            raise WeightSyncError(f"version {request.version} cannot be sent: no weight session is joined")
        others = {spec.dtype for spec in self.manifest.tensors} - {"bfloat16"}
        if request.keep and others:
            raise WeightSyncError(f"deltas are made of bfloat16 weights, these are {', '.join(others)}")
        deadline_at_s = time.monotonic() + request.deadline_s
        copy = self._copy
        if request.base_version >= 0 and (copy is None or copy.version != request.base_version):
            # The receivers expect a delta, or the word that everything follows.
            self._announce(request, deadline_at_s)
        elif request.base_version >= 0 and copy is not None:
            return self._send_delta(request, copy, tensors, deadline_at_s)
        return self._send_full(request, tensors, deadline_at_s)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = self._store = self._opened = None

    def _send_delta(
        self, request: SendWeights, copy: HostCopy, tensors: Tensors, deadline_at_s: float
    ) -> SendResult:
        started_s = time.monotonic()
        delta = copy.advance(request.version, tensors)
        gather_s = time.monotonic() - started_s
        if len(delta) > _LARGEST_DELTA_SHARE * self.manifest.num_bytes:
            self._announce(request, deadline_at_s)
            kept = tensors_in(self.manifest, copy.buffer)
            return self._send_full(request, kept, deadline_at_s, keep=False)
        started_s = time.monotonic()
        if request.folder:
            write_delta(request.folder, request.base_version, copy, delta)
        elif self._group is not None:
            send_delta(self._group, delta, self._bucket_bytes, deadline_at_s - started_s)
        return SendResult(
            checksums=copy.checksums,
            num_bytes=len(delta),
            gather_s=gather_s,
            wire_s=time.monotonic() - started_s,
            is_delta=True,
        )

    def _announce(self, request: SendWeights, deadline_at_s: float) -> None:
        """That all tensors follow in the place of a delta; a folder shows it by itself."""
        if self._group is not None and not request.folder:
            send_delta(self._group, None, self._bucket_bytes, deadline_at_s - time.monotonic())

    def _send_full(
        self, request: SendWeights, tensors: Tensors, deadline_at_s: float, *, keep: bool | None = None
    ) -> SendResult:
        keep = request.keep if keep is None else keep
        if keep:
            self._copy = self._copy or HostCopy.empty(self.manifest)
            tensors = self._copy.keeping(tensors)
        if request.folder:
            result = self._write_full(request, tensors)
        elif self._group is not None:
            left_s = deadline_at_s - time.monotonic()
            report = send_tensors(self._group, self.manifest, self.buckets, tensors, left_s)
            result = SendResult(
                checksums=report.checksums,
                num_bytes=report.num_bytes,
                gather_s=report.gather_s,
                wire_s=report.wire_s,
            )
        else:
            raise AssertionError("neither a group nor a folder")
        if keep and self._copy is not None:
            self._copy.complete(request.version, result.checksums)
        return result

    def _write_full(self, request: SendWeights, tensors: Tensors) -> SendResult:
        started_s = time.monotonic()
        index = write_full(request.folder, request.version, self.manifest, tensors, self._bucket_bytes)
        return SendResult(
            checksums=tuple(index.checksums),
            num_bytes=index.num_bytes,
            gather_s=time.monotonic() - started_s,
            wire_s=0.0,
        )
