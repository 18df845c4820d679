"""Which training engine a rank uses."""

from asyppo_async.trainer.worker.backend.plain import PlainBackend
from asyppo_async.trainer.worker.backend.protocol import Backend
from asyppo_async.trainer.worker.control import WorkerSettings
from asyppo_async.trainer.worker.critic_model import Critic
from asyppo_async.trainer.worker.lora import NO_ADAPTERS, Adapters
from asyppo_async.trainer.worker.model import Policy, recompute_layers
from asyppo_async.trainer.worker.world import World


def open_backend(
    model: Policy | Critic, settings: WorkerSettings, world: World, adapters: Adapters = NO_ADAPTERS
) -> Backend:
    """The engine that the settings name; `model` runs through it from now on, with the adapters that are in it."""
    if settings.recompute:
        recompute_layers(model.root)
    if settings.backend == "plain":
        return PlainBackend(
            model.module,
            model.root,
            world=world,
            learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_grad_norm,
            ema_decay=settings.ema_decay,
            adapters=adapters,
        )
    # Seconds to import, and not needed otherwise.
    from asyppo_async.trainer.worker.backend.deepspeed import DeepSpeedBackend

    backend = DeepSpeedBackend(
        model.module,
        model.root,
        world=world,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        zero_stage=settings.zero_stage,
        whole_below=settings.zero_whole_below,
        ema_decay=settings.ema_decay,
        adapters=adapters,
        offload=settings.offload,
    )
    model.run_in(backend.engine)
    return backend
