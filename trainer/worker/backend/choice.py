"""Which training engine a rank uses."""

from torch import nn

from asyppo_async.trainer.worker.backend.plain import PlainBackend
from asyppo_async.trainer.worker.backend.protocol import Backend
from asyppo_async.trainer.worker.control import WorkerSettings
from asyppo_async.trainer.worker.world import World


def open_backend(module: nn.Module, settings: WorkerSettings, world: World) -> Backend:
    return PlainBackend(
        module,
        world=world,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        warmup_steps=settings.warmup_steps,
        max_grad_norm=settings.max_grad_norm,
    )
