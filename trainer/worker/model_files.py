"""What a rank leaves on disk of its model: a Hugging Face folder, or peft's folder of its adapters."""

from pathlib import Path

from asyppo_async.errors import WorkerError
from asyppo_async.trainer.worker.backend.protocol import Backend
from asyppo_async.trainer.worker.control import WorkerSettings
from asyppo_async.trainer.worker.critic_model import HEAD_WEIGHT, save_head
from asyppo_async.trainer.worker.lora import Adapters
from asyppo_async.trainer.worker.lora_layers import write_peft_folder
from asyppo_async.trainer.worker.model import copy_companions
from asyppo_async.trainer.worker.world import World


class ModelFiles:
    """Of one rank. Every folder appears when it is complete, or not at all."""

    def __init__(self, backend: Backend, adapters: Adapters, settings: WorkerSettings, world: World) -> None:
        self._backend = backend
        self._adapters = adapters
        self._settings = settings
        self._is_first = world.rank == 0

    def save(self, folder: Path, *, adapter: bool) -> None:
        """Write the whole model with its tokenizer, adapters added to its weights; or its adapters alone. Collective.

        Raises:
            WorkerError: adapters are asked for, and there are none.
        """
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        if adapter:
            self._save_adapters(unfinished)
        else:
            self._backend.save(unfinished)
        if self._is_first:
            # A folder of adapters with the config of a whole model would be taken for one.
            without = "config.json" if adapter else ""
            copy_companions(Path(self._settings.model), unfinished, without=without)
            unfinished.rename(folder)

    def _save_adapters(self, folder: Path) -> None:
        role = self._settings.role
        if not self._adapters.layers:
            raise WorkerError(f"this {role} has no adapters to save: {role}.lora_rank is 0")
        pairs = self._adapters.pairs(self._backend.full_tensors, scaled=False)
        tensors = {name: tensor.cpu().clone() for name, tensor in pairs if self._is_first}
        heads = [HEAD_WEIGHT] if role == "critic" else []
        for _, head in self._backend.full_tensors(heads):
            if self._is_first:
                folder.mkdir(parents=True, exist_ok=True)
                save_head(head.cpu(), folder)
        if self._is_first:
            write_peft_folder(folder, tensors, self._adapters, self._settings)
