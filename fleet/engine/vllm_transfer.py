"""Our weight-transfer engine inside a vLLM worker process.

vLLM drives it in its own lifecycle: init, start, update, finish. In the staged way `init` maps and verifies the bytes
that the server process received, `update` hands them to the model's loader. In the direct way `init` joins the sender's
process group, one `update` loads every bucket as it arrives, and a second one compares the checksums.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from asyppo_async.errors import WeightSyncError
from asyppo_async.fleet.engine.vllm_experts import PackedExperts
from asyppo_async.fleet.engine.vllm_sources import DirectSource, DirectTensors, StagedSource, StagedTensors


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the bytes of the next updates come from; `source` are the fields of `StagedSource` or `DirectSource`."""

    way: Literal["staged", "direct"]
    source: dict[str, Any]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One of: load these staged tensors, receive within this deadline, compare these checksums, give up."""

    names: list[str] = field(default_factory=list)
    deadline_s: float = 0.0
    checksums: list[int] = field(default_factory=list)
    abort: str = ""
    """The only way to tell a worker that an update which has started will not be completed."""


class AsyppoTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # It warns at every update of each layer that has no tensor of its own (rotary caches, a tied head). What is
        # missing is found by the manifest and by the probe; a warning that always comes would hide one that counts.
        logging.getLogger(initialize_layerwise_reload.__module__).setLevel(logging.ERROR)
        self._staged: StagedTensors | None = None
        self._direct: DirectTensors | None = None
        self._experts: PackedExperts | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Verify the staged bytes, or meet the process group, before any served weight is touched."""
        self.shutdown()
        if init_info.way == "direct":
            parallel = self.parallel_config
            worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
            self._direct = DirectTensors(DirectSource(**init_info.source), worker)
            return
        staged = StagedTensors(StagedSource(**init_info.source))
        staged.verify()
        self._staged = staged

    def start_weight_update(self) -> None:
        if self.device.type == "cpu":
            self._experts = PackedExperts(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, which also synchronizes an accelerator that a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load what is asked for, or compare what was loaded.

        The bytes stay as they are until `finish_weight_update`, so the references that the layerwise reload keeps until
        a module is complete stay right.
        """
        try:
            if update_info.abort:
                raise WeightSyncError(f"the update was aborted: {update_info.abort}")
            if update_info.checksums and self._direct is not None:
                self._direct.compare(update_info.checksums)
                return
            self.model.load_weights(self._tensors(update_info))
        except BaseException:
            # Half-loaded modules keep what they were given; without this the next update would mix it in.
            self._end_reload()
            self._staged = None
            raise

    def finish_weight_update(self) -> None:
        self._end_reload()
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
        direct, self._direct = self._direct, None
        if direct is not None:
            direct.close()

    def _end_reload(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        experts, self._experts = self._experts, None
        if experts is not None:
            experts.give_back()

    def _tensors(self, update_info: UpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        if self._direct is not None:
            return self._direct.receive(update_info.deadline_s)
        if self._staged is None:
            raise WeightSyncError("no staged bytes are mapped; the update needs a verification first")
        return self._staged.tensors(frozenset(update_info.names))
