"""The experts of a mixture through a weight update on the CPU, where their weights are packed."""

from typing import Any

from torch import nn


class PackedExperts:
    """Lets vLLM pack the weights of experts again when it has loaded them again.

    vLLM packs them when it makes the layer's kernel. In an update it finds the kernel made and copies the weights as
    they come, which has the same shape and is silently wrong. Here the layers have no kernel while an update is under
    way, so that those which are loaded make a new one; the others get theirs back.
    """

    def __init__(self, model: nn.Module) -> None:
        """Take the kernels of all layers of experts; before the layerwise reload begins."""
        self._kernels: list[tuple[Any, Any]] = []
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if method is not None and getattr(method, "moe_kernel", None) is not None:
                self._kernels.append((method, method.moe_kernel))
                method.moe_kernel = None

    def give_back(self) -> None:
        """After the layerwise reload has ended, whatever came of it."""
        for method, kernel in self._kernels:
            if method.moe_kernel is None:
                method.moe_kernel = kernel
        self._kernels = []
