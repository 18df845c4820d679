"""Tensors over a torch process group outside the default one: rank 0 sends, every other rank receives.

A group serves one epoch of a weight session. Everything here blocks and belongs in a thread; every wait has a deadline.
Neither the store nor gloo authenticates its peers, so a group lives inside the run's network only, and both bind one
address, never all of them.
"""

import socket
import time
from datetime import timedelta
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

TransferBackend = Literal["gloo", "nccl"]

_SHORTEST_WAIT_S = 0.001
"""What is left of a deadline that has passed: torch reads zero as "no limit"."""


def open_store(host: str, world_size: int, deadline_s: float) -> tuple[Store, int]:
    """Start the store of a session at rank 0, on a free port of the address `host` alone.

    Returns:
        The store, and the port that the others connect to.

    Raises:
        WeightSyncError: the address is not one of this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind(address)
            listener.listen(world_size + 16)
            port = int(listener.getsockname()[1])
            file_descriptor = listener.detach()
    except OSError as error:
        raise WeightSyncError(f"the weight store cannot listen on {host}: {error}") from error
    store = TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=_duration(deadline_s),
        wait_for_workers=False,
        master_listen_fd=file_descriptor,
    )
    return store, port


def address_towards(host: str, port: int) -> str:
    """The address of this machine from which `host` is reached; no packet is sent."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise WeightSyncError(f"no way to the weight store at {host}:{port}: {error}") from error


class _Collectives(Protocol):
    """What both backends of torch have, though their stubs do not say so."""

    def broadcast(self, tensors: list[torch.Tensor], opts: BroadcastOptions, /) -> Work: ...

    def abort(self) -> None: ...


class WeightGroup:
    """The process group of one epoch. Every rank calls the same broadcasts in the same order."""

    def __init__(
        self, group: _Collectives, device: torch.device, rank: int, world_size: int, epoch: int
    ) -> None:
        self._group: _Collectives | None = group
        self._device = device
        self._name = f"rank {rank} of {world_size}, weight session epoch {epoch}"
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
                    *store, world_size, is_master=False, timeout=_duration(deadline_s), wait_for_workers=False
                )
            store.set_timeout(_duration(deadline_s))
            keyed = PrefixStore(f"epoch-{epoch}", store)
            if backend == "nccl":
                group, device = _open_nccl(keyed, rank, world_size, deadline_s)
            else:
                group, device = _open_gloo(keyed, rank, world_size, deadline_s, host or "127.0.0.1")
        except (RuntimeError, OSError) as error:
            raise WeightSyncError(
                f"rank {rank} of {world_size} could not join the weight session of epoch {epoch} within "
                f"{time.monotonic() - started_s:.1f} s (deadline {deadline_s:.1f} s): {_first_line(error)}"
            ) from error
        return cls(group, device, rank, world_size, epoch)

    def begin_broadcast(self, data: torch.Tensor, what: str, deadline_s: float) -> "Broadcast":
        """Start sending (rank 0) or receiving `data` (uint8, [n], host memory); it is not touched until finished."""
        if self._group is None:
            raise WeightSyncError(f"{self._name}: {what} asked for after the group was closed")
        on_wire = data if data.device == self._device else torch.empty_like(data, device=self._device)
        if on_wire is not data and self.rank == 0:
            on_wire.copy_(data)
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = _duration(deadline_s)
        started_s = time.monotonic()
        try:
            work = self._group.broadcast([on_wire], options)
        except RuntimeError as error:
            raise WeightSyncError(f"{self._name}: {what} did not start: {_first_line(error)}") from error
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
        """Leave the group: peers that wait for this rank fail at once. Closing twice does nothing.

        A broadcast of this rank that another thread waits for ends at its own deadline, or when its peer closes.
        """
        group, self._group = self._group, None
        if group is not None:
            group.abort()


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
        # The last reference to a gloo group waits for what is under way, so it is held where that is waited for
        # anyway, and never by whoever closes the group.
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
            # A little more than the collective's own deadline, whose message says more.
            self._work.wait(_duration(self._deadline_at_s - time.monotonic() + 1.0))
            if self._on_wire.is_cuda:
                self._wait_for_device()
        except RuntimeError as error:
            took_s = time.monotonic() - self._started_s
            raise WeightSyncError(
                f"{self._what} failed after {took_s:.1f} s: {_first_line(error)}"
            ) from error
        if self._landing is not None:
            self._landing.copy_(self._on_wire)

    def _wait_for_device(self) -> None:
        """NCCL's `wait` orders streams and returns at once; only the event says that the bytes are there."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        while not event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > self._deadline_at_s:
                raise RuntimeError("the device had not finished at the deadline")
            time.sleep(_SHORTEST_WAIT_S)


def _open_gloo(
    store: Store, rank: int, world_size: int, deadline_s: float, host: str
) -> tuple[_Collectives, torch.device]:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = _duration(deadline_s)
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    return cast(_Collectives, ProcessGroupGloo(store, rank, world_size, options)), torch.device("cpu")


def _open_nccl(
    store: Store, rank: int, world_size: int, deadline_s: float
) -> tuple[_Collectives, torch.device]:
    from torch.distributed import ProcessGroupNCCL  # noqa: PLC0415  not there in a CPU build of torch

    options = ProcessGroupNCCL.Options()
    options._timeout = _duration(deadline_s)
    device = torch.device("cuda", torch.cuda.current_device())
    return cast(_Collectives, ProcessGroupNCCL(store, rank, world_size, options)), device


def _duration(seconds: float) -> timedelta:
    return timedelta(seconds=max(seconds, _SHORTEST_WAIT_S))


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
