"""`asyppo-train`. Parses and checks first; torch and everything heavy is imported when there is something to do."""

import asyncio
import json
import os
import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from asyppo_async.errors import AsyppoError
from asyppo_async.trainer.critic_cli import add_critic_commands, fleet_override

app = typer.Typer(
    name="asyppo-train",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Role(StrEnum):
    """What a worker can be."""

    ACTOR = "actor"
    CRITIC = "critic"


add_critic_commands(app)

_COMMANDS = (
    "run",
    "resume",
    "eval",
    "report",
    "simulate",
    "worker",
    "pool",
    "pretrain-critics",
    "trace",
    "export",
    "best-of",
    "reference-success",
)

_RESTARTS = "How often the run may come back by itself after a part of it has died."


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
    restarts: Annotated[int | None, typer.Option(min=0, help=_RESTARTS)] = None,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
) -> None:
    """Train as CONFIG says, to the end, and write the run folder."""
    from asyppo_async.config.load import load_config

    settings = load_config(config, [*(set_ or []), *fleet_override(fleet), *_restarts_override(restarts)])

    from asyppo_async.trainer.supervise import run_training

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        interrupted = runner.run(run_training(settings, log_level))
    if interrupted:
        raise typer.Exit(130)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)],
    fleet: Annotated[
        str, typer.Option(help="Servers as host:port,host:port, where they are others than before.")
    ] = "",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting from here on."),
    ] = None,
    restarts: Annotated[int | None, typer.Option(min=0, help=_RESTARTS)] = None,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
) -> None:
    """Go on with an interrupted, failed or killed run, from its newest checkpoint that is whole."""
    from asyppo_async.trainer.supervise import resume_training

    overrides = [*(set_ or []), *fleet_override(fleet), *_restarts_override(restarts)]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        interrupted = runner.run(resume_training(folder, overrides, log_level))
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


@app.command(name="eval")
def evaluate(
    target: Annotated[
        Path,
        typer.Argument(metavar="RUN|MODEL_DIR", help="Folder of a run or of a model.", show_default=False),
    ],
    config: Annotated[
        Path | None,
        typer.Option(help="Settings for a model folder: task, sampling, evaluation. A run has its own."),
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="The run's best model instead of its last.")] = False,
    fleet: Annotated[
        str,
        typer.Option(
            help="Servers as host:port,host:port; they hold this model afterwards. Without: one is started."
        ),
    ] = "",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every figure to this file.")] = None,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "WARNING",
) -> None:
    """Measure a model on held-out prompts: avg@k, pass@k and greedy accuracy, with standard errors."""
    from rich.console import Console

    from asyppo_async.trainer.evaluate import evaluation_config, evaluation_table, run_evaluation

    settings = evaluation_config(target, config, best, [*(set_ or []), *fleet_override(fleet)])
    console = Console(highlight=False)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        evaluation = runner.run(run_evaluation(settings, log_level, console))
    if json_file is not None:
        json_file.write_text(json.dumps(asdict(evaluation), indent=2) + "\n", encoding="utf-8")
    console.print(evaluation_table(settings, evaluation))


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)],
) -> None:
    """Write RUN/report.html: curves, staleness, masks, critics, times, waste and sample responses on one page."""
    from asyppo_async.trainer.report.page import write_report

    print(write_report(folder))


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)],
    to: Annotated[Path, typer.Option(help="Folder for model/ and critics/.", show_default=False)],
    step: Annotated[int | None, typer.Option(help="Of the checkpoint; without it: the newest.")] = None,
    ema: Annotated[
        bool, typer.Option("--ema", help="The moving average of the actor's weights (actor.ema_decay).")
    ] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Only LoRA adapters, as peft reads them: adapter/.")
    ] = False,
) -> None:
    """Write actor and critics of a checkpoint in Hugging Face format, with tokenizer and chat template."""
    from asyppo_async.trainer.export import export_checkpoint

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        saved = runner.run(export_checkpoint(folder, step, to, print, average=ema, adapter=adapter))
    print(f"step {saved.version} of {folder}: {to}")


@app.command()
def worker(
    role: Annotated[Role, typer.Option(help="What to be.", show_default=False)],
    connect: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Where the run waits for workers; it prints this.", show_default=False
        ),
    ],
    token_file: Annotated[
        Path, typer.Option(help="The run's worker.token, copied from its run folder.")
    ] = Path("worker.token"),
    ranks: Annotated[
        int, typer.Option(min=0, help="Ranks to start here; 0: one per visible GPU, or one on the CPU.")
    ] = 0,
    critic: Annotated[
        int | None, typer.Option(min=0, help="Which critic to be; without it: where one is missing.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address of this machine for the other ranks; without it: found out.")
    ] = None,
    abandoned_after_s: Annotated[
        float, typer.Option(min=1, help="End after so many seconds without a word from the run.")
    ] = 60,
) -> None:
    """Join a run with ranks on this machine, until the run ends."""
    from asyppo_async.trainer.worker.join import join_run

    if not ranks:
        import torch

        ranks = torch.cuda.device_count() or 1
    code = join_run(
        role=role.value,
        connect=connect,
        token_file=token_file,
        num_ranks=ranks,
        critic=critic,
        host=host,
        abandoned_after_s=abandoned_after_s,
    )
    if code:
        raise typer.Exit(code)


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
    except* KeyboardInterrupt:
        sys.exit(130)


def _restarts_override(restarts: int | None) -> list[str]:
    return [] if restarts is None else [f"run.restarts={restarts}"]


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
