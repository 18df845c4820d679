"""Versions that are adapters (LoRA): what a server with `--enable-lora` loads in the place of the model's weights.

Every request names the one adapter that is served, from the start on; before the first publication it has no effect. A
load replaces it under a pause, so requests in flight go on with the new one, as they do with whole weights. Before that
the engine has loaded the new one beside it once, so what the engine does not take never touches what is served.
"""

import asyncio
import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

from asyppo_async.errors import WeightSyncError
from asyppo_async.fleet.engine.protocol import StagedWeights, WeightsLabel
from asyppo_async.fleet.engine.vllm_sources import StagedSource, StagedTensors
from asyppo_async.fleet.engine.vllm_versions import label_text
from asyppo_async.fleet.engine.vllm_weights import staged_source, worker_errors
from asyppo_async.weights.adapter import adapter_without_effect, write_adapter
from asyppo_async.weights.manifest import Manifest

NUM_PLACES = 2
"""Of adapters in the engine: the one that is served, and the one that is tried."""
_SERVED, _TRIED = 1, 2


class VllmAdapters:
    """Over an `AsyncLLM` with LoRA layers; the methods are those of the `Engine` protocol."""

    def __init__(self, llm: Any, base: Manifest) -> None:
        """`base`: of the model."""
        self._llm = llm
        self._base = base
        self._files = tempfile.TemporaryDirectory(prefix="asyppo-adapters-")
        self._served: Path | None = None
        self._tried: Path | None = None
        self._num_written = 0

    @property
    def request(self) -> Any:
        """What every request of the engine names."""
        if self._served is None:
            raise AssertionError("no adapter is loaded yet")
        return _named(_SERVED, self._served)

    async def start(self) -> None:
        """Load an adapter that has no effect."""
        folder = self._new_folder()
        await asyncio.to_thread(write_adapter, folder, adapter_without_effect(self._base))
        with worker_errors("load an adapter without effect"):
            await self._load(_SERVED, folder)
        self._served = folder

    async def verify_staged(self, staged: StagedWeights) -> None:
        folder = self._new_folder()
        await asyncio.to_thread(_write, staged, folder)
        with worker_errors("take the adapter"):
            await self._load(_TRIED, folder)
            await self._llm.remove_lora(_TRIED)
        self._tried = folder

    async def load_staged(self, staged: StagedWeights, label: WeightsLabel) -> None:
        folder, self._tried = self._tried, None
        if folder is None:
            raise WeightSyncError("no adapter was verified; the load needs a verification first")
        with worker_errors(f"load the adapter of version {label.version}"):
            await self._load(_SERVED, folder)
            await self._llm.update_weight_version(label_text(label))
        self._served = folder

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._files.cleanup()

    async def _load(self, place: int, folder: Path) -> None:
        if not await self._llm.add_lora(_named(place, folder, load_inplace=True)):
            raise WeightSyncError("a worker has not loaded the adapter")

    def _new_folder(self) -> Path:
        """All others but the one that is served go."""
        for folder in Path(self._files.name).iterdir():
            if folder != self._served:
                shutil.rmtree(folder)
        self._num_written += 1
        return Path(self._files.name) / str(self._num_written)


def _write(staged: StagedWeights, folder: Path) -> None:
    tensors = StagedTensors(StagedSource(**staged_source(staged)))
    tensors.verify()
    write_adapter(folder, tensors.tensors(frozenset(spec.name for spec in staged.manifest.tensors)))


def _named(place: int, folder: Path, *, load_inplace: bool = False) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(
        lora_name="served" if place == _SERVED else "tried",
        lora_int_id=place,
        lora_path=str(folder),
        load_inplace=load_inplace,
    )
