"""`asyppo-train`. Parses and checks first; torch and everything heavy is imported when there is something to do."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from asyppo_async.errors import AsyppoError

app = typer.Typer(
    name="asyppo-train",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_COMMANDS = ("run", "simulate")


@app.callback()
def program() -> None:
    """Train language models with asynchronous actor-critic reinforcement learning.

    `asyppo-train CONFIG.toml` is short for `asyppo-train run CONFIG.toml`.
    """


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="TOML file of the run; see examples/.", show_default=False)],
    fleet: Annotated[
        str,
        typer.Option(help="Servers as host:port,host:port. Without it a server is started on this machine."),
    ] = "",
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="SECTION.KEY=VALUE", help="Override a setting; may be given several times."
        ),
    ] = None,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
) -> None:
    """Train as CONFIG says, to the end, and write the run folder."""
    from asyppo_async.config.load import load_config

    overrides = list(set_ or [])
    if fleet:
        servers = ", ".join(f'"{address.strip()}"' for address in fleet.split(",") if address.strip())
        overrides.append(f"fleet.servers=[{servers}]")
    settings = load_config(config, overrides)

    from asyppo_async.trainer.run import run_training

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        interrupted = runner.run(run_training(settings, log_level))
    if interrupted:
        raise typer.Exit(130)


@app.command()
def simulate(
    config: Annotated[
        Path | None,
        typer.Argument(help="TOML file of the run; its [simulate] says what is assumed.", show_default=False),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting."),
    ] = None,
    from_run: Annotated[
        Path | None, typer.Option(help="Folder of a run: take its measured speeds, lengths and times.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every figure to this file.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Write an SVG to this file.")] = None,
) -> None:
    """Predict step time, use of both sides, staleness and waste of a run, and how to divide the GPUs."""
    from asyppo_async.config.load import load_config
    from asyppo_async.errors import ConfigError

    if config is None and from_run is None:
        raise ConfigError("name a CONFIG.toml, or a run with --from-run")
    settings = load_config(config or (from_run or Path()) / "config.toml", list(set_ or []))

    from asyppo_async.trainer.coordinator.simulate.command import simulate as simulate_run
    from asyppo_async.trainer.coordinator.simulate.measured import read_run

    measured = None if from_run is None else read_run(from_run)
    simulate_run(settings, measured=measured, json_file=json_file, plot_file=plot_file)


def main() -> None:
    """Entry point. Exit code 2 for a wrong option, 1 for an error (one line each), 130 when interrupted."""
    # Children are started by fork and exec while channels are open. gRPC's own fork handlers are for children that go
    # on using it; ours do not, and the handlers race with its threads. Read when grpc is imported, so set here.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    # Groups, fleet and coordinator may share the cores of one machine, and OpenMP threads that spin while they wait
    # take them from each other: a training step was ten times slower. Read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    arguments = sys.argv[1:]
    is_command = arguments and (arguments[0] in _COMMANDS or arguments[0] in ("--help", "-h"))
    if arguments and not is_command:
        arguments = ["run", *arguments]
    try:
        app(args=arguments)
    except* AsyppoError as group:
        for line in _lines(group):
            print(f"asyppo-train: {line}", file=sys.stderr)
        sys.exit(1)


def _lines(group: BaseExceptionGroup[AsyppoError]) -> list[str]:
    """Each distinct message once, outermost first."""
    messages: dict[str, None] = {}
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            messages.update(dict.fromkeys(_lines(error)))
        else:
            messages[str(error).replace("\n", " ")] = None
    return list(messages)


if __name__ == "__main__":
    main()
