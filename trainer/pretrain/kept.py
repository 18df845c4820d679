"""What a pretraining goes on from: where the critics' states lie, and what had been measured until then."""

import json
import math
import shutil
from dataclasses import asdict, dataclass

from asyppo_async.config.load import dump_config
from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import ConfigError
from asyppo_async.trainer.durable import replace_file
from asyppo_async.trainer.pretrain.progress import Progress
from asyppo_async.trainer.run_folder import RunFolder

_FILE = "pretraining.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    folder: str
    """Of the critics' states, within the run folder."""
    num_steps: int
    progress: Progress
    best: float
    """Of the stop rule; -inf before the first measurement."""
    best_step: int


def write_kept(folder: RunFolder, kept: Kept) -> None:
    """Name a complete state as the one to go on from, and remove the others."""
    best = kept.best if math.isfinite(kept.best) else None
    replace_file(folder.path / _FILE, json.dumps({**asdict(kept), "best": best}))
    for other in (folder.path / kept.folder).parent.iterdir():
        if other.name != (folder.path / kept.folder).name:
            shutil.rmtree(other)


def read_kept(folder: RunFolder) -> Kept | None:
    """What `write_kept` wrote last; None: nothing yet."""
    file = folder.path / _FILE
    if not file.is_file():
        return None
    tree = json.loads(file.read_text(encoding="utf-8"))
    best = -math.inf if tree["best"] is None else tree["best"]
    return Kept(**(tree | {"progress": Progress(**tree["progress"]), "best": best}))


def open_folder(config: TrainConfig, *, resume: bool) -> RunFolder:
    """A new folder, or that of the pretraining that is to go on.

    Raises:
        ConfigError: There is nothing to go on with, or its settings were others.
    """
    if not resume:
        return RunFolder.create(config)
    folder = RunFolder(config.run.folder / config.run.name)
    settings = folder.path / "config.toml"
    if not settings.is_file():
        raise ConfigError(f"there is no pretraining in {folder.path} to go on with; leave --resume out")
    if settings.read_text(encoding="utf-8") != dump_config(config):
        raise ConfigError(f"the pretraining in {folder.path} had other settings: {settings}; use those")
    return folder


def abandon_rows(folder: RunFolder, num_steps: int) -> None:
    """Mark the metrics of steps that are made again."""
    file = folder.path / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    marked = [row if row["version"] <= num_steps else {**row, "abandoned": True} for row in rows]
    replace_file(file, "".join(json.dumps(row) + "\n" for row in marked))
