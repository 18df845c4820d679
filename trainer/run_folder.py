"""The folder of a run: resolved configuration, one line of metrics per step, the summary, logs.

runs/NAME/
  config.toml      resolved; loading it gives the same run
  metrics.jsonl    one JSON object per training step
  evaluations.jsonl
  samples.jsonl    a few responses of each step as text, with their rewards
  traces.jsonl     the same responses token by token, with what was decided about each, of runs with critics
  draws.jsonl      one line per attempt at a draw that ended: trained at which step, or why not
  candidates.jsonl one line per prompt that a selecting sampler considered: which draw it became, or skipped
  run.json         id of the run, and its incarnation: how often it has been resumed
  checkpoints/     what `asyppo-train resume` goes on from
  summary.json     written at the end, also of an interrupted or failed run
  report.html      all of it on a page
  model/           the trained actor, Hugging Face format
  critics/         the trained critics, `critic-0`, ...: `critic.model` of another run
  best/            the actor of the best evaluation, where `evaluation.keep_best_by` asks for it
  tensorboard/     the numbers of metrics.jsonl as event files
  logs/            of the trainer, the embedded fleet and each worker rank
"""

import asyncio
import json
import math
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeAlias

from asyppo_async.config.load import dump_config
from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import ConfigError
from asyppo_async.trainer.coordinator.draws import Consideration, Fate, News
from asyppo_async.trainer.durable import replace_file

Row: TypeAlias = Mapping[str, object]
"""What JSON can hold: numbers, strings, None, lists and mappings of them."""


class RunFolder:
    """Owns the files of one run. Every write is complete or absent: rows are appended whole, files are renamed."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @classmethod
    def create(cls, config: TrainConfig) -> Self:
        """The folder of a new run.

        Raises:
            ConfigError: There is one already, or none can be written.
        """
        folder = cls(config.run.folder / config.run.name)
        if (folder.path / "config.toml").exists():
            if not config.run.overwrite:
                raise ConfigError(
                    f"the run folder {folder.path} exists; go on with `asyppo-train resume {folder.path}`, choose "
                    "another name with --set run.name=NAME, or replace it with --set run.overwrite=true"
                )
            shutil.rmtree(folder.path)
        try:
            folder.logs.mkdir(parents=True, exist_ok=True)
            (folder.path / "config.toml").write_text(dump_config(config), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write the run folder {folder.path}: {error.strerror}") from None
        return folder

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def critics(self) -> Path:
        return self.path / "critics"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def outcome(self) -> str:
        """Of the run, as its summary says; empty while it has none."""
        file = self.path / "summary.json"
        return str(json.loads(file.read_text(encoding="utf-8"))["outcome"]) if file.exists() else ""

    @property
    def has_checkpoint(self) -> bool:
        return (self.checkpoints / "latest").exists()

    async def put(self, place: Path, save: Callable[[Path], Awaitable[None]]) -> None:
        """Have a model written; what an earlier end of the run has left there stays until then."""
        unfinished = self.path / f".{place.name}.new"
        await asyncio.to_thread(shutil.rmtree, unfinished, True)
        await save(unfinished)
        await asyncio.to_thread(_put_in_place, unfinished, place)

    def append_step(self, row: Row) -> None:
        self._append("metrics.jsonl", [row])

    def append_evaluation(self, row: Row) -> None:
        self._append("evaluations.jsonl", [row])

    def append_samples(self, rows: Sequence[Row]) -> None:
        if rows:
            self._append("samples.jsonl", rows)

    def append_traces(self, rows: Sequence[Row]) -> None:
        if rows:
            self._append("traces.jsonl", rows)

    def append_news(self, news: News, *, with_candidates: bool) -> None:
        """What the ledger has listed."""
        self._append("draws.jsonl", [_fate_row(fate) for fate in news.fates])
        if with_candidates:
            self._append("candidates.jsonl", [_candidate_row(entry) for entry in news.considered])

    def write_summary(self, row: Row) -> None:
        replace_file(self.path / "summary.json", json.dumps(_finite(row), indent=2) + "\n")

    def _append(self, name: str, rows: Sequence[Row]) -> None:
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(_finite(row)) + "\n" for row in rows))


def _put_in_place(folder: Path, place: Path) -> None:
    place.parent.mkdir(exist_ok=True)
    shutil.rmtree(place, ignore_errors=True)
    folder.rename(place)


def _fate_row(fate: Fate) -> Row:
    return {
        "draw": fate.draw.draw_id,
        "attempt": fate.draw.attempt,
        "prompt": fate.draw.prompt_id,
        "epoch": fate.draw.epoch,
        "admission_version": fate.draw.admission_version,
        "outcome": fate.outcome,
        "reason": fate.reason,
        "step": fate.step,
        "tokens": fate.num_tokens,
    }


def _candidate_row(entry: Consideration) -> Row:
    candidate = entry.candidate
    return {
        "number": candidate.number,
        "prompt": candidate.prompt_id,
        "epoch": candidate.epoch,
        "accepted": candidate.accepted,
        "acceptance": candidate.acceptance,
        "success_estimate": candidate.success_estimate,
        "draw": entry.draw_id,
        "version": entry.version,
    }


def _finite(value: object) -> object:
    """NaN and infinities are no JSON: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
