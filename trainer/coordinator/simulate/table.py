"""A prediction for a person: tables on the terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from asyppo_async.config.sections import TrainConfig
from asyppo_async.trainer.coordinator.simulate.measured import Measured
from asyppo_async.trainer.coordinator.simulate.plan import Division, Prediction, advice

_BAR_WIDTH = 30


def show_prediction(console: Console, config: TrainConfig, prediction: Prediction) -> None:
    """Time, use, staleness and waste of the division that the configuration names."""
    figures = prediction.figures
    table = Table(
        title=f"{config.run.name}: {_words(prediction.division)}", title_justify="left", show_header=False
    )
    waste = ", ".join(f"{reason} {share:.1%}" for reason, share in figures.waste.items()) or "none"
    rows = [
        ("step", f"{figures.step_s:.4g} s (median {figures.median_step_s:.4g} s)"),
        ("whole run", f"{_duration(figures.step_s * config.run.num_steps)} for {config.run.num_steps} steps"),
        ("tokens trained", f"{figures.trained_tokens_per_s:,.0f} /s"),
        (
            "trainer",
            f"trains {figures.trainer_share:.0%}, waits {figures.wait_share:.0%}, "
            f"publishes {figures.publication_share:.0%}",
        ),
        (
            "fleet",
            f"{figures.fleet_tokens_share:.0%} of full speed, {figures.fleet_share:.0%} of its slots taken",
        ),
        (
            "staleness",
            f"mean {figures.mean_staleness:.2f}, worst {figures.worst_staleness} "
            f"(bound {config.staleness.max_staleness})",
        ),
        ("tokens wasted", waste),
        ("length trained / issued", f"{figures.length_ratio:.3f}"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
    for age, share in enumerate(figures.staleness_histogram):
        console.print(f"  staleness {age:>2} {'#' * round(_BAR_WIDTH * share):<{_BAR_WIDTH}} {share:6.1%}")
    for line in advice(config, prediction):
        console.print(f"note: {line}")


def show_divisions(console: Console, predictions: Sequence[Prediction], chosen: Prediction) -> None:
    """The divisions that were tried, the recommended one marked."""
    table = Table(title="Dividing the GPUs", title_justify="left")
    for name in ("servers", "trainer GPUs", "step s", "tokens/s", "trains", "fleet", "age", ""):
        table.add_column(name, justify="right")
    for prediction in predictions:
        figures = prediction.figures
        table.add_row(
            str(prediction.division.num_servers),
            str(prediction.division.trainer_gpus),
            f"{figures.step_s:.4g}",
            f"{figures.trained_tokens_per_s:,.0f}",
            f"{figures.trainer_share:.0%}",
            f"{figures.fleet_tokens_share:.0%}",
            f"{figures.mean_staleness:.2f}",
            "best" if prediction is chosen else "",
        )
    console.print(table)


def show_measured(console: Console, config: TrainConfig, measured: Measured, prediction: Prediction) -> None:
    """The run's own step beside the predicted one; how far off it is only where the settings are the run's."""
    predicted_s = prediction.figures.median_step_s
    difference = (
        f"{predicted_s / measured.step_s - 1:+.1%}" if measured.is_of(config) else "with other settings"
    )
    console.print(
        f"measured: median step {measured.step_s:.3f} s over {measured.num_steps} steps "
        f"(training {measured.training_s:.3f}, wait {measured.wait_s:.3f}, publication {measured.publication_s:.3f}); "
        f"predicted {predicted_s:.3f} s, {difference}"
    )


def _words(division: Division) -> str:
    servers = "1 server" if division.num_servers == 1 else f"{division.num_servers} servers"
    gpus = "1 trainer GPU" if division.trainer_gpus == 1 else f"{division.trainer_gpus} trainer GPUs"
    return f"{servers}, {gpus}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
