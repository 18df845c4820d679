"""The torch world of one group: its store and the sums over its ranks.

A process group of its own and not torch's default one: several worlds may meet in one process (a group, a weight
session), and only here the address that gloo binds is ours to choose.
"""

from collections.abc import Sequence
from datetime import timedelta
from itertools import groupby
from typing import Self

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import (
    AllreduceOptions,
    HashStore,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOp,
    Store,
    TCPStore,
)

from asyppo_async.weights.store import address_towards

_BACKEND = "asyppo_gloo"
_LOOPBACK = "127.0.0.1"
_ALONE_TIMEOUT = timedelta(minutes=10)
"""Of collectives that nobody else takes part in."""


class World:
    """Rank and size, and the collectives of the ranks. Of one rank, they do nothing."""

    def __init__(self, rank: int, size: int, *, store: Store, host: str, timeout: timedelta) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._host = host
        self._timeout = timeout
        self._group = self._new_group("world", store, rank, size) if size > 1 else None

    @classmethod
    def alone(cls) -> Self:
        return cls(0, 1, store=HashStore(), host=_LOOPBACK, timeout=_ALONE_TIMEOUT)

    @classmethod
    def join(
        cls, store: Store | tuple[str, int], *, rank: int, size: int, host: str | None, deadline_s: float
    ) -> Self:
        """Meet the other ranks; `deadline_s` bounds this and every later collective.

        Args:
            store: rank 0's own store, or host and port where it listens.
            rank: of this process.
            size: number of ranks.
            host: address that gloo binds; None: the one from which the store is reached.
            deadline_s: seconds.
        """
        if size == 1:
            return cls.alone()
        timeout = timedelta(seconds=deadline_s)
        if isinstance(store, tuple):
            host = host or address_towards(*store)
            store = TCPStore(*store, size, is_master=False, timeout=timeout, wait_for_workers=False)
        return cls(rank, size, store=store, host=host or _LOOPBACK, timeout=timeout)

    def open_default_group(self) -> None:
        """Make torch's default process group of the same ranks, for a library that knows no other.

        torch's own gloo would bind whatever address the host's name stands for; this one binds the world's.
        """
        if not hasattr(distributed.Backend, _BACKEND.upper()):
            distributed.Backend.register_backend(
                _BACKEND,
                lambda place, _: self._new_group("", place.store, place.group_rank, place.group_size),
                extended_api=True,
                devices="cpu",
            )
        if not distributed.is_initialized():
            distributed.init_process_group(
                f"cpu:{_BACKEND},cuda:nccl" if torch.cuda.is_available() else _BACKEND,
                store=PrefixStore("default", self._store),
                rank=self.rank,
                world_size=self.size,
                timeout=self._timeout,
            )

    def sum_in_place(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks: one collective per dtype, the same bits on every rank."""
        if self._group is None:
            return
        for dtype, members in groupby(
            sorted(tensors, key=lambda tensor: str(tensor.dtype)), key=lambda t: t.dtype
        ):
            same = list(members)
            flat = torch.cat([tensor.reshape(-1) for tensor in same]).to(device="cpu", dtype=dtype)
            self._reduce(flat, ReduceOp.SUM)
            parts = torch.split(flat, [tensor.numel() for tensor in same])
            for tensor, part in zip(same, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

    def max_in_place(self, tensor: Tensor) -> None:
        """Replace a host tensor by its elementwise maximum over the ranks."""
        if self._group is not None:
            self._reduce(tensor, ReduceOp.MAX)

    def close(self) -> None:
        self._group = None

    def _new_group(self, name: str, store: Store, rank: int, size: int) -> ProcessGroupGloo:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._timeout
        options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]
        return ProcessGroupGloo(PrefixStore(name, store), rank, size, options)

    def _reduce(self, tensor: Tensor, operation: ReduceOp.RedOpType) -> None:
        assert self._group is not None
        options = AllreduceOptions()
        options.reduceOp = operation  # type: ignore[assignment]
        self._group.allreduce([tensor], options).wait()  # type: ignore[attr-defined]
