"""Where the rows of a run go besides its folder's JSONL: TensorBoard and Weights & Biases."""

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import ConfigError

_NOT_IN_AN_ID = r"[/\\#?%:]"
"""Characters that Weights & Biases refuses there."""


class Tracker(Protocol):
    """A sink for the numbers of a run."""

    def log(self, numbers: Mapping[str, float], version: int) -> None:
        """Keep `numbers` under their names, at `version`."""
        ...


class Trackers:
    """Every sink that the run asked for."""

    def __init__(self, trackers: tuple[Tracker, ...]) -> None:
        self._trackers = trackers

    def log(self, row: Mapping[str, object], version: int, *, prefix: str = "") -> None:
        """Hand the numbers of `row` to every sink; what is no number stays in the run folder."""
        numbers = {
            prefix + name: float(value)
            for name, value in row.items()
            if isinstance(value, int | float) and name != "version"
        }
        for tracker in self._trackers:
            tracker.log(numbers, version)


@contextmanager
def open_trackers(config: TrainConfig, folder: Path, run_id: str, version: int = 0) -> Iterator[Trackers]:
    """The sinks of `[tracking]`; what they hold is written out when the block is left.

    Args:
        config: Of the run.
        folder: Of the run.
        run_id: The run's own, the same over its resumes: Weights & Biases goes on with the run of that id.
        version: That the run goes on from; TensorBoard hides what it was told of later ones.

    Raises:
        ConfigError: The library of a sink that was asked for is not installed, or it refused to start.
    """
    with ExitStack() as stack:
        trackers: list[Tracker] = []
        if config.tracking.tensorboard:
            trackers.append(stack.enter_context(_tensorboard(folder / "tensorboard", version)))
        if config.tracking.wandb != "off":
            trackers.append(stack.enter_context(_wandb(config, folder, run_id)))
        yield Trackers(tuple(trackers))


class _TensorBoard:
    def __init__(self, folder: Path, version: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter  # slow to import, and not every run wants it

        self.writer = SummaryWriter(log_dir=str(folder), purge_step=version + 1 if version else None)

    def log(self, numbers: Mapping[str, float], version: int) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, version)


@contextmanager
def _tensorboard(folder: Path, version: int) -> Iterator[Tracker]:
    tracker = _TensorBoard(folder, version)
    try:
        yield tracker
    finally:
        tracker.writer.close()


class _Wandb:
    def __init__(self, config: TrainConfig, folder: Path, run_id: str) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                f'tracking.wandb = "{config.tracking.wandb}", but Weights & Biases is not installed: '
                "pip install 'asyppo-async[wandb]'"
            ) from None
        mode = config.tracking.wandb
        assert mode != "off"
        try:
            self.run = wandb.init(
                project=config.tracking.wandb_project,
                id=re.sub(_NOT_IN_AN_ID, "-", run_id),
                resume="allow",
                name=config.run.name,
                dir=str(folder),
                mode=mode,
                config=config.model_dump(mode="json"),
                settings=wandb.Settings(silent=True),
            )
        except wandb.errors.Error as error:
            raise ConfigError(f"Weights & Biases did not start: {error}") from None

    def log(self, numbers: Mapping[str, float], version: int) -> None:
        # An evaluation of an older version may come after newer steps, so the axis is a number of its own.
        self.run.log({**numbers, "version": version})


@contextmanager
def _wandb(config: TrainConfig, folder: Path, run_id: str) -> Iterator[Tracker]:
    tracker = _Wandb(config, folder, run_id)
    tracker.run.define_metric("version")
    tracker.run.define_metric("*", step_metric="version")
    try:
        yield tracker
    finally:
        tracker.run.finish()
