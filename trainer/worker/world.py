"""The torch world of one group: its store and the sums over its ranks.

A process group of its own and not torch's default one: several worlds may meet in one process (a group, a weight
session), and only here the address that gloo binds is ours to choose.
"""

from collections.abc import Sequence
from datetime import timedelta
from itertools import groupby
from typing import Self

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOp,
    Store,
    TCPStore,
)

from asyppo_async.weights.group import address_towards


class World:
    """Rank and size, and the collectives of the ranks. Of one rank, they do nothing."""

    def __init__(self, rank: int, size: int, group: ProcessGroupGloo | None) -> None:
        self.rank = rank
        self.size = size
        self._group = group

    @classmethod
    def alone(cls) -> Self:
        return cls(0, 1, None)

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
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = [ProcessGroupGloo.create_device(hostname=host or "127.0.0.1")]
        return cls(rank, size, ProcessGroupGloo(PrefixStore("world", store), rank, size, options))

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

    def _reduce(self, tensor: Tensor, operation: ReduceOp.RedOpType) -> None:
        assert self._group is not None
        options = AllreduceOptions()
        options.reduceOp = operation  # type: ignore[assignment]
        self._group.allreduce([tensor], options).wait()  # type: ignore[attr-defined]
