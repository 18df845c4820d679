"""The folder of a run: resolved configuration, one line of metrics per step, the summary, logs.

runs/NAME/
  config.toml      resolved; loading it gives the same run
  metrics.jsonl    one JSON object per training step
  evaluations.jsonl
  summary.json     written at the end, also of an interrupted or failed run
  model/           the trained actor, Hugging Face format
  logs/            of the trainer, the embedded fleet and each worker rank
"""

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from asyppo_async.config.load import dump_config
from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import ConfigError

Row: TypeAlias = Mapping[str, object]
"""What JSON can hold: numbers, strings, None, lists and mappings of them."""


class RunFolder:
    """Owns the files of one run. Every write is complete or absent: rows are appended whole, files are renamed."""

    def __init__(self, config: TrainConfig) -> None:
        self.path = (config.run.folder / config.run.name).absolute()
        if (self.path / "config.toml").exists():
            if not config.run.overwrite:
                raise ConfigError(
                    f"the run folder {self.path} exists; choose another name with --set run.name=NAME, "
                    "or replace it with --set run.overwrite=true"
                )
            shutil.rmtree(self.path)
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            (self.path / "config.toml").write_text(dump_config(config), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write the run folder {self.path}: {error.strerror}") from None

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def append_step(self, row: Row) -> None:
        self._append("metrics.jsonl", row)

    def append_evaluation(self, row: Row) -> None:
        self._append("evaluations.jsonl", row)

    def write_summary(self, row: Row) -> None:
        self._write("summary.json", json.dumps(_finite(row), indent=2) + "\n")

    def _append(self, name: str, row: Row) -> None:
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(row)) + "\n")

    def _write(self, name: str, text: str) -> None:
        temporary = self.path / f".{name}.partial"
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, self.path / name)


def _finite(value: object) -> object:
    """NaN and infinities are no JSON: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
