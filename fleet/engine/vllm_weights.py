"""The calls of vLLM's weight-transfer lifecycle, in the order that each way needs."""

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from asyppo_async.errors import WeightSyncError
from asyppo_async.fleet.engine.protocol import DirectPlace, StagedWeights, WeightsLabel
from asyppo_async.fleet.engine.vllm_versions import label_text


class VllmWeights:
    """Over an `AsyncLLM`; the methods are those of the `Engine` protocol."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    async def verify_staged(self, staged: StagedWeights) -> None:
        with worker_errors("verify the staged weights"):
            await self._llm.init_weight_transfer_engine(_init_request("staged", staged_source(staged)))

    async def load_staged(self, staged: StagedWeights, label: WeightsLabel) -> None:
        with worker_errors(f"load version {label.version} ({len(staged.load_names)} tensors)"):
            await self._llm.start_weight_update()
            async with self._left_on_failure(f"load of version {label.version}"):
                await self._update(names=list(staged.load_names))
                await self._llm.finish_weight_update(weight_version=label_text(label))

    async def join_direct(self, place: DirectPlace) -> None:
        specs = place.manifest.tensors
        source = {
            "backend": place.backend,
            "store_host": place.store_host,
            "store_port": place.store_port,
            "first_rank": place.first_rank,
            "world_size": place.world_size,
            "epoch": place.epoch,
            "names": [spec.name for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "dtypes": [spec.dtype for spec in specs],
            "bucket_bytes": place.bucket_bytes,
            "deadline_s": place.deadline_s,
        }
        with worker_errors("join the weight session"):
            await self._llm.init_weight_transfer_engine(_init_request("direct", source))

    async def receive_direct(self, deadline_s: float) -> None:
        with worker_errors("receive the weights"):
            await self._llm.start_weight_update()
            async with self._left_on_failure("the receiving failed"):
                await self._update(deadline_s=deadline_s)

    async def finish_direct(self, checksums: Sequence[int], label: WeightsLabel) -> None:
        with worker_errors(f"finish version {label.version}"):
            async with self._left_on_failure(f"finish of version {label.version}"):
                await self._update(checksums=list(checksums))
                await self._llm.finish_weight_update(weight_version=label_text(label))

    async def leave_direct(self) -> None:
        with contextlib.suppress(Exception):
            await self._llm.shutdown_weight_transfer_engine()

    async def _update(self, **info: Any) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))

    @contextlib.asynccontextmanager
    async def _left_on_failure(self, reason: str) -> AsyncIterator[None]:
        try:
            yield
        except Exception:
            await self.leave_update(reason)
            raise

    async def leave_update(self, reason: str) -> None:
        """Only a failing `update_weights` makes a worker leave an update that has started."""
        with contextlib.suppress(Exception):
            await self._update(abort=reason)


def staged_source(staged: StagedWeights) -> dict[str, Any]:
    """The fields of `StagedSource`, as they travel to a worker."""
    specs = staged.manifest.tensors
    return {
        "process_id": staged.process_id,
        "file_descriptor": staged.file_descriptor,
        "num_bytes": staged.num_bytes,
        "names": [spec.name for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
        "dtypes": [spec.dtype for spec in specs],
        "checksums": list(staged.checksums),
    }


@contextlib.contextmanager
def worker_errors(what: str) -> Iterator[None]:
    """vLLM reports a worker's exception as a plain one with its text."""
    try:
        yield
    except Exception as error:
        raise WeightSyncError(f"the engine failed to {what}: {error}") from error


def _init_request(way: str, source: dict[str, Any]) -> Any:
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    return WeightTransferInitRequest(init_info={"way": way, "source": source})
