"""`asyppo-train export`: actor and critics of a checkpoint, as folders that transformers and vLLM load, or peft.

The worker groups of the run restore the checkpoint and save themselves, so whatever a run can train, this can export.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from asyppo_async.config.load import load_config
from asyppo_async.errors import CheckpointError, ConfigError
from asyppo_async.trainer.coordinator.checkpoint import CheckpointFolder, Saved
from asyppo_async.trainer.critic_folder import critic_name
from asyppo_async.trainer.parts import open_run_groups
from asyppo_async.trainer.run_folder import RunFolder


async def export_checkpoint(
    run: Path,
    step: int | None,
    target: Path,
    on_line: Callable[[str], None],
    *,
    average: bool = False,
    adapter: bool = False,
) -> Saved:
    """Write `target/model` and `target/critics/critic-0`, ...: what the run itself writes at its end.

    Or with `adapter` `target/adapter` and `target/critic-adapters/critic-0`, ..., of those that have adapters.

    Args:
        run: Folder of a run, which may be training meanwhile.
        step: Of the checkpoint; None: the newest.
        target: Folder for them, made if it is not there.
        on_line: Told what a person has to do elsewhere.
        average: The moving average of the actor's weights in their place.
        adapter: The adapters alone.

    Raises:
        ConfigError: `run` is no run folder, or has no adapters, or `target` has a model already.
        CheckpointError: There is no such checkpoint, or not all of it.
    """
    source, place = RunFolder(run), RunFolder(target)
    if not (source.path / "config.toml").is_file():
        raise ConfigError(f"{run} is no run folder: it has no config.toml")
    model = place.path / "adapter" if adapter else place.model
    critics_folder = place.path / "critic-adapters" if adapter else place.critics
    for folder in (model, critics_folder):
        if folder.exists():
            raise ConfigError(f"{folder} exists; choose another --to, or remove it")
    config = load_config(source.path / "config.toml", ["run.worker_port=0"])
    if average and config.actor.ema_decay == 0:
        raise ConfigError(f"{run} kept no moving average (actor.ema_decay = 0): leave --ema out")
    wanted = [not adapter or config.critic.of(index).lora_rank > 0 for index in range(config.critic.count)]
    of_actor = not adapter or config.actor.lora_rank > 0
    if not of_actor and not any(wanted):
        raise ConfigError(f"{run} trained whole weights (lora_rank = 0): leave --adapter out")
    checkpoints = CheckpointFolder(source.checkpoints, config.checkpoint.keep)
    saved = checkpoints.newest() if step is None else checkpoints.of_version(step)
    if saved is None:
        raise CheckpointError(f"{run} has no checkpoint yet")
    place.path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="asyppo-export-") as logs:
        async with open_run_groups(config, Path(logs), on_line, saved.folder, average=average) as (
            actor,
            critics,
        ):
            if of_actor:
                await place.put(model, partial(actor.save, adapter=adapter))
            for index, critic in enumerate(critics):
                if wanted[index]:
                    await place.put(
                        critics_folder / critic_name(index), partial(critic.save, adapter=adapter)
                    )
    return saved
