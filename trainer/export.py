"""`asyppo-train export`: actor and critics of a checkpoint, as folders that transformers and vLLM load.

The worker groups of the run restore the checkpoint and save themselves, so whatever a run can train, this can export.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

from asyppo_async.config.load import load_config
from asyppo_async.errors import CheckpointError, ConfigError
from asyppo_async.trainer.coordinator.checkpoint import CheckpointFolder, Saved
from asyppo_async.trainer.critic_folder import critic_name
from asyppo_async.trainer.parts import open_run_groups
from asyppo_async.trainer.run_folder import RunFolder


async def export_checkpoint(
    run: Path, step: int | None, target: Path, on_line: Callable[[str], None], *, average: bool = False
) -> Saved:
    """Write `target/model` and `target/critics/critic-0`, ...: what the run itself writes at its end.

    Args:
        run: Folder of a run, which may be training meanwhile.
        step: Of the checkpoint; None: the newest.
        target: Folder for them, made if it is not there.
        on_line: Told what a person has to do elsewhere.
        average: The moving average of the actor's weights in their place.

    Raises:
        ConfigError: `run` is no run folder, or `target` has a model already.
        CheckpointError: There is no such checkpoint, or not all of it.
    """
    source, place = RunFolder(run), RunFolder(target)
    if not (source.path / "config.toml").is_file():
        raise ConfigError(f"{run} is no run folder: it has no config.toml")
    for folder in (place.model, place.critics):
        if folder.exists():
            raise ConfigError(f"{folder} exists; choose another --to, or remove it")
    config = load_config(source.path / "config.toml", ["run.worker_port=0"])
    if average and config.actor.ema_decay == 0:
        raise ConfigError(f"{run} kept no moving average (actor.ema_decay = 0): leave --ema out")
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
            await place.put(place.model, actor.save)
            for index, critic in enumerate(critics):
                await place.put(place.critics / critic_name(index), critic.save)
    return saved
