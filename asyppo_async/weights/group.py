"""Tensors over a torch process group outside the default one: rank 0 sends, every other rank receives.

A group serves one epoch of a weight session. Everything here blocks and belongs in a thread; every wait has a deadline.
Neither the store nor gloo authenticates its peers, so a group lives inside the run's network only, and both bind one
address, never all of them.
"""

import contextlib
import threading
import time
from typing import Literal, Protocol, Self, cast

import torch
from torch._C._distributed_c10d import (
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
    Work,
)

from asyppo_async.errors import WeightSyncError
from asyppo_async.weights.store import address_towards, duration

TransferBackend = Literal["gloo", "nccl"]

_SESSION = "weight session epoch"
_PEERS_EVERY_S = 0.5
_NOBODYS_TAG = 0x4E4F424F
"""Of operations that no peer receives; broadcasts count their tags from zero."""
_HANG_UP_TAG = 0x48414E47
"""Of operations that no peer sends."""
_HANG_UP_S = 0.001
_DEVICE_EVERY_S = 0.001
_GIVEN_UP_EVERY_S = 0.05


def noticed_by_group(words: str) -> bool:
    """Whether an error's words are those of a group of which another party has failed, or is late.

    Words, because an engine reports what its worker processes raise as text only.
    """
    return _SESSION in words


class _Collectives(Protocol):
    """What both backends of torch have, though their stubs do not say so."""

    def broadcast(self, tensors: list[torch.Tensor], opts: BroadcastOptions, /) -> Work: ...

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work: ...

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work: ...

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def abort(self) -> None: ...


class WeightGroup:
    """The process group of one epoch. Every rank calls the same broadcasts in the same order."""

    def __init__(
        self, group: _Collectives, device: torch.device, rank: int, world_size: int, epoch: int
    ) -> None:
        self._group: _Collectives | None = group
        self._under_way: list[Work] = []
        self.device = device
        """Where the collectives take their tensors."""
        self._name = f"rank {rank} of {world_size}, {_SESSION} {epoch}"
        self.rank = rank
        self.world_size = world_size
        self.epoch = epoch

    @classmethod
    def join(
        cls,
        *,
        backend: TransferBackend,
        store: Store | tuple[str, int],
        rank: int,
        world_size: int,
        epoch: int,
        deadline_s: float,
        host: str | None = None,
    ) -> Self:
        """Meet the other ranks at the store.

        Args:
            backend: What carries the bytes.
            store: Rank 0's own store, or the host and port where it listens.
            rank: 0 sends.
            world_size: Sender and receivers together.
            epoch: Keeps the keys and the bytes of different sessions apart.
            deadline_s: For all ranks to arrive.
            host: Address of this rank that the others connect to; found from the way to the store if not given.

        Raises:
            WeightSyncError: not all ranks arrived in time.
        """
        started_s = time.monotonic()
        try:
            if isinstance(store, tuple):
                host = host or address_towards(*store)
                store = TCPStore(
                    *store, world_size, is_master=False, timeout=duration(deadline_s), wait_for_workers=False
                )
            store.set_timeout(duration(deadline_s))
            keyed = PrefixStore(f"epoch-{epoch}", store)
            if backend == "nccl":
                group, device = _open_nccl(keyed, rank, world_size, deadline_s)
            else:
                group, device = _open_gloo(keyed, rank, world_size, deadline_s, host or "127.0.0.1")
        except (RuntimeError, OSError) as error:
            raise WeightSyncError(
                f"rank {rank} of {world_size} could not join the {_SESSION} {epoch} within "
                f"{time.monotonic() - started_s:.1f} s (deadline {deadline_s:.1f} s): {_first_line(error)}"
            ) from error
        return cls(group, device, rank, world_size, epoch)

    def begin_broadcast(self, data: torch.Tensor, what: str, deadline_s: float) -> "Broadcast":
        """Start sending (rank 0) or receiving `data` (uint8, [n], host memory); it is not touched until finished."""
        if self._group is None:
            raise WeightSyncError(f"{self._name}: {what} asked for after the group was closed")
        on_wire = data if data.device == self.device else torch.empty_like(data, device=self.device)
        if on_wire is not data and self.rank == 0:
            on_wire.copy_(data)
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = duration(deadline_s)
        started_s = time.monotonic()
        try:
            work = self._group.broadcast([on_wire], options)
        except RuntimeError as error:
            raise WeightSyncError(f"{self._name}: {what} did not start: {_first_line(error)}") from error
        self._under_way = [*(begun for begun in self._under_way if not begun.is_completed()), work]
        landing = None if on_wire is data or self.rank == 0 else data
        return Broadcast(
            self._group, work, on_wire, landing, f"{self._name}: {what}", started_s, started_s + deadline_s
        )

    def send_bucket(self, data: torch.Tensor, deadline_s: float) -> None:
        """Send `data` (uint8, [n]) from rank 0 to all others.

        Raises:
            WeightSyncError: a receiver is gone or the deadline has passed; the group is unusable from then on.
        """
        self.begin_broadcast(data, f"sending {len(data)} bytes", deadline_s).finish()

    def receive_bucket(self, into: torch.Tensor, deadline_s: float) -> None:
        """Receive what rank 0 sends into `into` (uint8, [n]); errors as `send_bucket`."""
        self.begin_broadcast(into, f"receiving {len(into)} bytes", deadline_s).finish()

    def close(self) -> None:
        """Leave the group: peers that wait for this rank fail at once, and so does a broadcast of this rank that
        another thread waits for. Closing twice does nothing.
        """
        group, self._group = self._group, None
        if group is None:
            return
        if self.device.type == "cpu":
            _hang_up(group)
        group.abort()
        under_way = [work for work in self._under_way if not work.is_completed()]
        if under_way:
            arguments = (group, under_way)
            threading.Thread(target=_outlive, args=arguments, name="closed-group", daemon=True).start()


class Broadcast:
    """A broadcast that was begun."""

    def __init__(
        self,
        group: _Collectives,
        work: Work,
        on_wire: torch.Tensor,
        landing: torch.Tensor | None,
        what: str,
        started_s: float,
        deadline_at_s: float,
    ) -> None:
        self._group = group
        self._work = work
        self._on_wire = on_wire
        self._landing = landing
        self._what = what
        self._started_s = started_s
        self._deadline_at_s = deadline_at_s

    def finish(self) -> None:
        """Wait until the data has left this rank (sender) or is all there (receiver).

        Raises:
            WeightSyncError: with what was under way, how long it took and the transport's own words.
        """
        try:
            if self._on_wire.is_cuda:
                self._work.wait(duration(self._deadline_at_s - time.monotonic() + 1.0))
                self._wait_for_device()
            else:
                self._wait_for_gloo()
        except RuntimeError as error:
            took_s = time.monotonic() - self._started_s
            raise WeightSyncError(
                f"{self._what} failed after {took_s:.1f} s: {_first_line(error)}"
            ) from error
        if self._landing is not None:
            self._landing.copy_(self._on_wire)

    def _wait_for_gloo(self) -> None:
        """In slices: gloo never tells a transfer that was cut midway, whose peer is gone, before its deadline.

        It tells every operation begun afterwards, so one that nobody takes is begun with each peer after a slice.
        """
        # A little more than the collective's own deadline, whose message says more.
        deadline_at_s = self._deadline_at_s + 1.0
        while True:
            left_s = deadline_at_s - time.monotonic()
            try:
                self._work.wait(duration(min(left_s, _PEERS_EVERY_S)))
                return
            except RuntimeError:
                if self._work.is_completed():  # it failed; or it ended just after this wait gave up
                    self._work.wait()
                    return
                if left_s <= _PEERS_EVERY_S:
                    raise
            for rank in range(self._group.size()):
                if rank != self._group.rank():
                    self._group.send([torch.empty(0)], rank, _NOBODYS_TAG)

    def _wait_for_device(self) -> None:
        """NCCL's `wait` orders streams and returns at once; only the event says that the bytes are there."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        while not event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > self._deadline_at_s:
                raise RuntimeError("the device had not finished at the deadline")
            time.sleep(_DEVICE_EVERY_S)


def _hang_up(group: _Collectives) -> None:
    """Close gloo's connections. Its `abort` leaves them open as long as an operation is under way on them.

    A wait that is too long for one operation closes those of the whole group.
    """
    for rank in range(group.size()):
        if rank == group.rank():
            continue
        with contextlib.suppress(
            RuntimeError
        ):  # too late, as meant; or this peer's connection is closed already
            group.recv([torch.empty(0)], rank, _HANG_UP_TAG).wait(duration(_HANG_UP_S))


def _outlive(group: _Collectives, works: list[Work]) -> None:
    """Hold `group` until gloo has given up `works`: whoever drops its last reference waits for them.

    Asleep, not in `wait`: a daemon thread that comes back from torch's C++ while Python ends aborts the process.
    """
    while not all(work.is_completed() for work in works):
        time.sleep(_GIVEN_UP_EVERY_S)
    del group


def _open_gloo(
    store: Store, rank: int, world_size: int, deadline_s: float, host: str
) -> tuple[_Collectives, torch.device]:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = duration(deadline_s)
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    return cast(_Collectives, ProcessGroupGloo(store, rank, world_size, options)), torch.device("cpu")


def _open_nccl(
    store: Store, rank: int, world_size: int, deadline_s: float
) -> tuple[_Collectives, torch.device]:
    from torch.distributed import ProcessGroupNCCL  # noqa: PLC0415  not there in a CPU build of torch

    options = ProcessGroupNCCL.Options()
    options._timeout = duration(deadline_s)
    device = torch.device("cuda", torch.cuda.current_device())
    return cast(_Collectives, ProcessGroupNCCL(store, rank, world_size, options)), device


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
