"""Our weight-transfer engine inside a vLLM worker process.

vLLM drives it in its own lifecycle: init, start, update, finish. In the staged way `init` maps and verifies the bytes
that the server process received, `update` hands them to the model's loader. A direct way (a worker that joins the
sender's process group itself) differs in `init_transfer_engine` and in where `receive_weights` gets its tensors.
"""

import logging
import mmap
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from asyppo_async.errors import WeightSyncError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class StagedInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the staged bytes are, and what they should be. Lists are in the order of the byte space."""

    process_id: int
    file_descriptor: int
    num_bytes: int
    names: list[str]
    shapes: list[list[int]]
    dtypes: list[str]
    offsets: list[int]
    checksums: list[int]

    def __post_init__(self) -> None:
        lengths = {len(each) for each in (self.names, self.shapes, self.dtypes, self.offsets, self.checksums)}
        if len(lengths) != 1:
            raise ValueError(
                f"names, shapes, dtypes, offsets and checksums differ in length: {sorted(lengths)}"
            )


@dataclass
class StagedUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """`abort` is the only way to tell a worker that an update which has started will not be completed."""

    abort: str = ""


class StagedTransferEngine(WeightTransferEngine[StagedInitInfo, StagedUpdateInfo]):  # type: ignore[misc]
    init_info_cls = StagedInitInfo
    update_info_cls = StagedUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # It warns at every update of each layer that has no tensor of its own (rotary caches, a tied head). What is
        # missing is found by the manifest and by the probe; a warning that always comes would hide one that counts.
        logging.getLogger(initialize_layerwise_reload.__module__).setLevel(logging.ERROR)
        self._staged: _StagedTensors | None = None

    def init_transfer_engine(self, init_info: StagedInitInfo) -> None:
        """Map the staged bytes and verify their checksums, before any served weight is touched."""
        self._staged = None
        staged = _StagedTensors(init_info)
        staged.verify()
        self._staged = staged

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, which also synchronizes an accelerator that a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: StagedUpdateInfo) -> None:
        """Hand every staged tensor to the model's loader.

        The bytes stay mapped, unchanged, until `finish_weight_update`, so the references that the layerwise reload
        keeps until a module is complete stay right.
        """
        try:
            if update_info.abort:
                raise WeightSyncError(f"the update was aborted: {update_info.abort}")
            if self._staged is None:
                raise WeightSyncError("no staged bytes are mapped; the update needs a verification first")
            self.model.load_weights(self._staged.tensors())
        except BaseException:
            # Half-loaded modules keep what they were given; without this the next update would mix it in.
            finalize_layerwise_reload(self.model, self.model_config)
            self._staged = None
            raise

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        staged, self._staged = self._staged, None
        if self.device.type == "cpu":
            self.repack_embeddings()
        if staged is not None:
            staged.check_unreferenced(self.model)

    def repack_embeddings(self) -> None:
        """Pack the weight of a tied head anew for the CPU's matrix product.

        The CPU dispatch packs a weight once. The layerwise reload runs it again for the module that the weight is
        loaded through (the embedding, which comes first), but not for others that share the weight: a tied head would
        go on with the old one.
        """
        owners: set[int] = set()
        for module in self.model.modules():
            if isinstance(getattr(module, "quant_method", None), UnquantizedEmbeddingMethod):
                if id(module.weight) in owners:
                    module.quant_method.process_weights_after_loading(module)
                owners.add(id(module.weight))

    def shutdown(self) -> None:
        self._staged = None


class _StagedTensors:
    """A read-only view of the staged bytes (private mapping: a write would never reach the other processes)."""

    def __init__(self, info: StagedInitInfo) -> None:
        path = f"/proc/{info.process_id}/fd/{info.file_descriptor}"
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                mapped = mmap.mmap(
                    descriptor, info.num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
                )
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise WeightSyncError(f"the staged weights at {path} cannot be mapped: {error}") from error
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        self._info = info

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        info = self._info
        for name, shape, dtype, offset in zip(
            info.names, info.shapes, info.dtypes, info.offsets, strict=True
        ):
            element = _DTYPES[dtype]
            end = offset + element.itemsize * torch.Size(shape).numel()
            yield name, self._bytes[offset:end].view(element).view(shape)

    def verify(self) -> None:
        for (name, tensor), expected in zip(self.tensors(), self._info.checksums, strict=True):
            found = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)
            if found != expected:
                raise WeightSyncError(f"checksum of {name}: {found:#010x} staged, {expected:#010x} sent")

    def check_unreferenced(self, model: torch.nn.Module) -> None:
        """The next version arrives in the same bytes, so no served weight may live in them."""
        start = self._bytes.data_ptr()
        end = start + self._bytes.numel()
        for name, parameter in model.named_parameters():
            if start <= parameter.data_ptr() < end:
                raise WeightSyncError(f"{name} still refers to the staged bytes after the load")
