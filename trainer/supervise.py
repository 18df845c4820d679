"""A run over all its lives: started or resumed, and brought back from its last checkpoint when a part of it dies."""

import asyncio
import logging
import time
from pathlib import Path

from asyppo_async.config.load import dump_config, load_config
from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import (
    AsyppoError,
    ConfigError,
    FleetUnavailable,
    Stalled,
    WeightSyncError,
    WorkerError,
)
from asyppo_async.logs import set_up_logging
from asyppo_async.trainer.coordinator.checkpoint import CheckpointFolder
from asyppo_async.trainer.coordinator.cut import Restored, read_cut
from asyppo_async.trainer.durable import replace_file
from asyppo_async.trainer.lineage import abandon_rows, first_identity, next_identity
from asyppo_async.trainer.live import Display
from asyppo_async.trainer.material import Material, open_material
from asyppo_async.trainer.run import Life, Run
from asyppo_async.trainer.run_folder import RunFolder
from asyppo_async.trainer.servers import Servers
from asyppo_async.trainer.signals import stop_on_signals

_log = logging.getLogger(__name__)

_MENDED_BY_RESTART = (WorkerError, FleetUnavailable, WeightSyncError, Stalled)
"""Something has died or hangs. Not what would come again: a wrong setting, a broken reward, a divergence."""


async def run_training(config: TrainConfig, log_level: str) -> bool:
    """Train as `config` says.

    Returns:
        Whether a signal ended the run before its last step.

    Raises:
        AsyppoError: The run failed (also within a group); its folder holds what was reached, with the reason.
    """
    material = await open_material(config)
    folder = RunFolder.create(config)
    return await _Supervisor(config, material, folder, log_level).live(resumes=False)


async def resume_training(path: Path, overrides: list[str], log_level: str) -> bool:
    """Go on with the run whose folder is `path`, from its newest checkpoint that is whole; as `run_training`.

    Raises:
        ConfigError: It is no run folder, the run has nothing left to do, or a setting does not fit what is saved.
        CheckpointError: No checkpoint is whole.
    """
    if not (path / "config.toml").is_file():
        raise ConfigError(f"{path} is no run folder: it has no config.toml")
    config = load_config(path / "config.toml", overrides)
    _check_resumable(load_config(path / "config.toml"), config)
    material = await open_material(config)
    folder = RunFolder(path)
    if overrides:
        replace_file(folder.path / "config.toml", dump_config(config))
    return await _Supervisor(config, material, folder, log_level).live(resumes=True)


def describe(error: BaseException) -> str:
    """The words of an error, or of the errors of a group, each once."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(dict.fromkeys(describe(inner) for inner in error.exceptions))
    return f"{type(error).__name__}: {error}"


class _Supervisor:
    def __init__(self, config: TrainConfig, material: Material, folder: RunFolder, log_level: str) -> None:
        self._config = config
        self._material = material
        self._folder = folder
        self._display = Display(config.run.num_steps)
        set_up_logging(log_level, folder.logs / "trainer.log", console=not self._display.is_terminal)
        for prompts in material.tasks:
            _log.info("%s", prompts)

    async def live(self, *, resumes: bool) -> bool:
        """One life after the other; whether a signal ended the last one."""
        task = asyncio.current_task()
        assert task is not None
        with stop_on_signals(task) as stop, self._display.open():
            async with Servers(self._config, self._folder) as servers:
                run = await self._begin(servers, resumes=resumes)
                for restarts_left in range(self._config.run.restarts, 0, -1):
                    try:
                        return await self._live_once(run, stop)
                    except Exception as error:
                        words = describe(error)
                        if stop.is_set() or not is_mended_by_restart(error):
                            run.recorder.close("failed", words)
                            raise
                        self._tell(
                            f"{words}; going back to the last checkpoint ({restarts_left} restarts left)"
                        )
                        run = await self._come_back(run, servers, words)
                return await self._last_life(run, stop)

    async def _last_life(self, run: Run, stop: asyncio.Event) -> bool:
        try:
            return await self._live_once(run, stop)
        except Exception as error:
            run.recorder.close("failed", describe(error))
            raise

    async def _come_back(self, run: Run, servers: Servers, words: str) -> Run:
        try:
            return await self._begin(servers, resumes=True)
        except AsyppoError:
            run.recorder.close("failed", words)
            raise

    def _tell(self, words: str) -> None:
        _log.warning("%s", words)
        self._display.result(words)

    async def _begin(self, servers: Servers, *, resumes: bool) -> Run:
        folder = self._folder
        restored = await asyncio.to_thread(self._restore) if resumes else None
        identity = (
            next_identity(folder.path) if resumes else first_identity(folder.path, self._config.run.name)
        )
        return Run(
            Life(
                config=self._config,
                material=self._material,
                folder=folder,
                servers=servers,
                display=self._display,
                identity=identity,
                restored=restored,
            )
        )

    async def _live_once(self, run: Run, stop: asyncio.Event) -> bool:
        """Whether a signal ended it."""
        try:
            is_interrupted = not await run.train(stop)
        except asyncio.CancelledError:
            is_interrupted = True
        run.recorder.close("interrupted" if is_interrupted else "finished", None)
        return is_interrupted

    def _restore(self) -> Restored | None:
        """The newest checkpoint that is whole, and the rows of what came after it marked; None: from the beginning."""
        folder = self._folder
        saved = CheckpointFolder(folder.checkpoints, self._config.checkpoint.keep).newest()
        restored = None
        if saved is not None:
            material = self._material
            restored = read_cut(saved.folder, material.train, material.sampling, time.monotonic())
        version = 0 if saved is None else saved.version
        if version >= self._config.run.num_steps and folder.outcome == "finished":
            raise ConfigError(
                f"{folder.path} has made all its {version} steps; give it more with --set run.num_steps=NUMBER"
            )
        abandoned = abandon_rows(folder.path, None if restored is None else restored.state.core)
        (folder.path / "summary.json").unlink(missing_ok=True)
        self._display.result(
            f"resuming {folder.path} from "
            f"{'the initial weights: it has no checkpoint' if saved is None else f'step {version}'}"
            f"{f', {abandoned} later steps are abandoned' if abandoned else ''}"
        )
        return restored


def is_mended_by_restart(error: BaseException) -> bool:
    """Whether everything that went wrong may be gone in another life."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_mended_by_restart, error.exceptions))
    return isinstance(error, _MENDED_BY_RESTART)


_FIXED = (
    "run.seed",
    "actor.dtype",
    "critic.count",
    "critic.dtype",
    "batch.group_size",
    "selection.prompts",
)
"""Settings that what is saved depends on. Ranks, training engine and ZeRO stage are none of them."""


def _check_resumable(old: TrainConfig, new: TrainConfig) -> None:
    """Raise `ConfigError` where an override would give the saved state another meaning."""
    for name in _FIXED:
        section, key = name.split(".")
        before, after = (getattr(getattr(config, section), key) for config in (old, new))
        if before != after:
            raise ConfigError(
                f"a resumed run keeps {name} = {before!r}, and --set gives {after!r}: start a new run instead"
            )
