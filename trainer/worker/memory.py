"""What a training step takes of memory: bytes that wait for the backward, and the peak."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def forget_peak(device: torch.device) -> None:
    """Start a new measurement of `peak_bytes`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR.exists():
        _CLEAR.write_text(_RESET_PEAK)


def peak_bytes(device: torch.device) -> int:
    """Highest since `forget_peak`: what torch had allocated on a GPU; on a CPU what of this process was resident."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if not _STATUS.exists():
        return 0
    lines = _STATUS.read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


class ActivationCount:
    """Counts what autograd keeps for the backward, each storage once, weights left out."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._seen: set[int] = set()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Around one forward. What is recomputed in the backward is not kept, so it does not count."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept):
            yield
        self._seen.clear()

    def _pack(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                self.num_bytes += storage.nbytes()
        # Not the tensor itself: an output that its own node keeps through a hook is a cycle, and is never freed.
        return tensor.detach()
