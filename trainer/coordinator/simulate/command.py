"""`asyppo-train simulate`: from a configuration, or from a run's figures, to tables, JSON and a plot."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import ConfigError
from asyppo_async.trainer.coordinator.simulate.measured import Measured, assume
from asyppo_async.trainer.coordinator.simulate.plan import (
    Division,
    Prediction,
    best,
    division_of,
    divisions,
    num_steps,
    num_warm_up,
    predict,
)
from asyppo_async.trainer.coordinator.simulate.plot import svg_of
from asyppo_async.trainer.coordinator.simulate.table import show_divisions, show_measured, show_prediction


def simulate(
    config: TrainConfig, *, measured: Measured | None, json_file: Path | None, plot_file: Path | None
) -> None:
    """Predict, print, and write what was asked for.

    Args:
        config: The run; its `[simulate]` says what is assumed.
        measured: A run whose figures replace those assumptions.

    Raises:
        ConfigError: contradicting assumptions, or a file that cannot be written.
        Stalled: no batch can be filled in this world.
    """
    console = Console(file=sys.stdout, highlight=False)
    if measured is not None:
        config = assume(config, measured)
    own = division_of(config)
    others = [division for division in divisions(config) if division != own]
    predictions = _predict_all(console, config, [own, *others])
    own_prediction = predictions[0]
    by_size = sorted(predictions, key=lambda one: one.division.num_servers)
    console.print(
        f"simulated, not measured: {config.simulate.steps} steps after {num_warm_up(config)} of warm-up"
    )
    show_prediction(console, config, own_prediction)
    if others:
        show_divisions(console, by_size, best(predictions))
    if measured is not None:
        show_measured(console, config, measured, own_prediction)
    if json_file is not None:
        _write(json_file, _json_of(config, own_prediction, by_size, measured))
    if plot_file is not None:
        _write(plot_file, svg_of(f"{config.run.name} (simulated)", own_prediction, by_size))


def _predict_all(console: Console, config: TrainConfig, wanted: list[Division]) -> list[Prediction]:
    columns = (
        TextColumn("simulated steps"),
        MofNCompleteColumn(),
        BarColumn(bar_width=30),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("steps", total=len(wanted) * num_steps(config))
        return [predict(config, division, lambda made: progress.advance(bar)) for division in wanted]


def _json_of(
    config: TrainConfig, own: Prediction, predictions: list[Prediction], measured: Measured | None
) -> str:
    row: dict[str, object] = {
        "assumed": config.simulate.model_dump(mode="json"),
        "prediction": asdict(own),
        "divisions": [asdict(prediction) for prediction in predictions],
        "recommended": asdict(best(predictions).division),
    }
    if measured is not None:
        row["measured_median_step_s"] = measured.step_s
        if measured.is_of(config):
            row["deviation"] = own.figures.median_step_s / measured.step_s - 1
    return json.dumps(row, indent=1) + "\n"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
