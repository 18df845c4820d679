"""Tensors whose contents wait in host memory while another group has the device."""

import time
from collections.abc import Iterable

import torch
from torch import Tensor


class Away:
    """Remembers where what was sent away belongs. The tensors stay the same objects: only their contents move."""

    def __init__(self) -> None:
        self._homes: list[tuple[Tensor, torch.device]] = []

    def send(self, tensors: Iterable[Tensor]) -> None:
        """To host memory; of a tensor that is there already a copy, so that what it had is free in any case."""
        for tensor in tensors:
            self._homes.append((tensor, tensor.device))
            tensor.data = _host_copy(tensor.data)

    def bring_back(self) -> None:
        """All of them, bit for bit."""
        for tensor, home in self._homes:
            tensor.data = tensor.data.to(home)
        self._homes.clear()


def _host_copy(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor.to("cpu", copy=True)
    # Locked memory is several times faster, both ways.
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)


def release_device() -> float:
    """Give what is free in torch's own pool back to the device, for other processes; when that was done (monotonic)."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return time.monotonic()
