"""A delta, whose size only the sender knows, through a weight group: its length first, then pieces of bounded size."""

import time

import numpy as np
import torch
from numpy.typing import NDArray

from asyppo_async.weights.group import WeightGroup
from asyppo_async.weights.transfer import NUM_BUFFERS

_ALL_FOLLOWS = -1
_HEADER_BYTES = 8


def send_delta(
    group: WeightGroup, delta: NDArray[np.uint8] | None, piece_bytes: int, deadline_s: float
) -> float:
    """Send `delta` (uint8, [n]) from rank 0; None: say that all tensors follow instead.

    Returns:
        Seconds that the wire took.

    Raises:
        WeightSyncError: a receiver is gone or the deadline has passed.
    """
    started_s = time.monotonic()
    num_bytes = _ALL_FOLLOWS if delta is None else len(delta)
    group.send_bucket(torch.tensor([num_bytes], dtype=torch.int64).view(torch.uint8), deadline_s)
    if delta is not None and len(delta):
        _broadcast(group, torch.from_numpy(delta.copy()), "sending", piece_bytes, started_s + deadline_s)
    return time.monotonic() - started_s


def receive_delta(group: WeightGroup, piece_bytes: int, deadline_s: float) -> NDArray[np.uint8] | None:
    """The delta that rank 0 sends, uint8 [n]; None: all tensors follow instead."""
    deadline_at_s = time.monotonic() + deadline_s
    header = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
    group.receive_bucket(header, deadline_s)
    num_bytes = int(header.view(torch.int64)[0])
    if num_bytes == _ALL_FOLLOWS:
        return None
    data = torch.empty(num_bytes, dtype=torch.uint8)
    _broadcast(group, data, "receiving", piece_bytes, deadline_at_s)
    delta: NDArray[np.uint8] = data.numpy()
    return delta


def _broadcast(
    group: WeightGroup, data: torch.Tensor, verb: str, piece_bytes: int, deadline_at_s: float
) -> None:
    under_way = []
    for start in range(0, len(data), piece_bytes):
        piece = data[start : start + piece_bytes]
        what = f"{verb} {len(piece)} of {len(data)} bytes of a delta"
        under_way.append(group.begin_broadcast(piece, what, deadline_at_s - time.monotonic()))
        if len(under_way) == NUM_BUFFERS:
            under_way.pop(0).finish()
    for broadcast in under_way:
        broadcast.finish()
