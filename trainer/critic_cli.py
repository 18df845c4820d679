"""The commands of `asyppo-train` that are about critics: trajectory pools and value pretraining."""

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console

pool_app = typer.Typer(no_args_is_help=True, help="Trajectory pools for value pretraining.")

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Override a setting; may be given several times."
    ),
]
Config = Annotated[Path, typer.Argument(help="TOML file of the run; see examples/.", show_default=False)]
FleetOption = Annotated[
    str, typer.Option(help="Servers as host:port,host:port. Without it a server is started on this machine.")
]


def fleet_override(fleet: str) -> list[str]:
    """`--fleet` as an override of the settings; nothing where it was not given."""
    servers = ", ".join(f'"{address.strip()}"' for address in fleet.split(",") if address.strip())
    return [f"fleet.servers=[{servers}]"] if servers else []


def pretrain_critics(
    config: Config,
    pool: Annotated[Path | None, typer.Option(help="Learn from this trajectory pool (S3AC).")] = None,
    policy: Annotated[
        Path | None, typer.Option(help="Learn from fresh responses of this frozen model (VC-PPO).")
    ] = None,
    fleet: FleetOption = "",
    set_: Settings = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint of the same pretraining.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "WARNING",
) -> None:
    """Pretrain the critics of CONFIG; a run takes them with critic.model."""
    from asyppo_async.config.load import load_config
    from asyppo_async.errors import ConfigError

    if (pool is None) == (policy is None):
        raise ConfigError("name what the critics learn from: --pool DIR or --policy MODEL_DIR, one of them")
    settings = load_config(config, [*(set_ or []), *fleet_override(fleet)])

    from asyppo_async.trainer.pretrain.command import pretrain_over_policy, pretrain_over_pool
    from asyppo_async.trainer.pretrain.page import result_table

    console = Console(highlight=False)
    with console.status("starting") as status, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if pool is not None:
            done = pretrain_over_pool(settings, pool, log_level, status.update, console.print, resume=resume)
        else:
            assert policy is not None
            done = pretrain_over_policy(
                settings, policy, log_level, status.update, console.print, resume=resume
            )
        progress = runner.run(done)
    console.print(result_table(progress))


def trace(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)],
    prompt: Annotated[str | None, typer.Option(help="Only responses to the prompt of this id.")] = None,
) -> None:
    """Write RUN/trace.html: responses token by token, coloured by what the critics think."""
    from asyppo_async.trainer.trace_view import count_slips, read_traces, write_trace_page

    traces = read_traces(folder, prompt)
    print(write_trace_page(folder, traces))
    print(count_slips(traces))


def best_of(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)],
    n: Annotated[int, typer.Option("--n", min=1, help="Responses of each held-out prompt.")] = 8,
    beams: Annotated[int, typer.Option(min=1, help="Beginnings that go on in the beam search.")] = 2,
    step_tokens: Annotated[int, typer.Option(min=1, help="Tokens by which they grow at a time.")] = 8,
    fleet: FleetOption = "",
    set_: Settings = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every figure to this file.")] = None,
) -> None:
    """Let a run's critics choose among responses, against a majority vote and the first sample."""
    from asyppo_async.errors import ConfigError
    from asyppo_async.trainer.best_of import Search, best_of_config
    from asyppo_async.trainer.best_of import best_of as choose
    from asyppo_async.trainer.best_of_table import best_of_table

    if beams > n:
        raise ConfigError(f"--beams {beams} exceeds --n {n}: of n beginnings at most n can go on")
    settings = best_of_config(folder, [*(set_ or []), *fleet_override(fleet)])
    console = Console(highlight=False)
    with console.status("starting") as status, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(choose(settings, Search(n=n, beams=beams, step_tokens=step_tokens), status.update))
    if json_file is not None:
        json_file.write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")
    console.print(best_of_table(found))


def reference_success(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)],
    policy: Annotated[
        Path | None, typer.Option(help="Model that is asked; without it the one that the run started from.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Fresh responses to each prompt.")] = 32,
    prompts: Annotated[int, typer.Option(min=1, help="At most so many prompts.")] = 256,
    fleet: FleetOption = "",
    set_: Settings = None,
) -> None:
    """Measure how hard the prompts were that a run chose, by fresh responses of one policy."""
    from asyppo_async.trainer.reference_success import measure, reference_config, success_table

    settings = reference_config(folder, policy, [*(set_ or []), *fleet_override(fleet)])
    console = Console(highlight=False)
    with console.status("starting") as status, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        done = measure(settings, folder, samples=samples, num_prompts=prompts, on_phase=status.update)
        found = runner.run(done)
    console.print(success_table(found))


@pool_app.command()
def collect(config: Config, fleet: FleetOption = "", set_: Settings = None) -> None:
    """Sample the policies of `pool.policies`, weak to strong, into the pool `pool.path`."""
    from asyppo_async.config.load import load_config

    settings = load_config(config, [*(set_ or []), *fleet_override(fleet)])

    from asyppo_async.trainer.pool.collect import collect as collect_pool

    console = Console(highlight=False)
    with console.status("starting") as status, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(collect_pool(settings, status.update, console.print))
    console.print(f"asyppo-train pool info {settings.pool.path}")


@pool_app.command()
def info(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a pool.", show_default=False)],
    edge: Annotated[
        list[int] | None,
        typer.Option(help="Upper end of a length bucket, in tokens; may be given several times."),
    ] = None,
    least: Annotated[
        int, typer.Option(min=1, help="Fewer trajectories of a cell than this are missing.")
    ] = 32,
) -> None:
    """Show what a pool covers, by length bucket, right or wrong, and policy, and what is missing."""
    from asyppo_async.trainer.pool.coverage import cover, coverage_table, length_edges, missing_lines
    from asyppo_async.trainer.pool.pool import open_pool

    entries = open_pool(folder).entries
    coverage = cover(entries, length_edges(entries, edge or ()))
    console = Console(highlight=False)
    console.print(
        f"{len(entries)} trajectories of {coverage.num_prompts} prompts, {coverage.num_tokens:,} response tokens"
    )
    console.print(coverage_table(coverage))
    for line in missing_lines(coverage, least):
        console.print(line)


def add_critic_commands(app: typer.Typer) -> None:
    """Make the commands of this module those of `asyppo-train`."""
    app.add_typer(pool_app, name="pool")
    app.command(name="pretrain-critics")(pretrain_critics)
    app.command()(trace)
    app.command(name="best-of")(best_of)
    app.command(name="reference-success")(reference_success)
