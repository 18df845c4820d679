"""`asyppo-fleet`: parse first, import what is heavy after."""

import asyncio
import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from pydantic import ValidationError
from rich.console import Console

from asyppo_async.config.serve import ServeConfig
from asyppo_async.errors import AsyppoError
from asyppo_async.fleet.options import with_settings
from asyppo_async.logs import set_up_logging

if TYPE_CHECKING:
    from asyppo_async.rpc.security import ClientSecurity

app = typer.Typer(
    name="asyppo-fleet",
    help="Inference servers of asyppo-async.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root() -> None:
    """Inference servers of asyppo-async: token ids in, token ids out, weights received while they generate."""


@app.command()
@with_settings()
def serve(values: dict[str, Any]) -> None:
    """Serve one model: generation and weight updates over gRPC.

    SIGTERM or Ctrl-C lets running requests finish within the grace, a second signal ends the server at once.
    """
    config = _serve_config(values)
    set_up_logging(as_json=config.log_json)
    with _errors():
        _serve(config)


Addresses = Annotated[list[str], typer.Argument(metavar="HOST:PORT...", help="Servers.", show_default=False)]
TokenFile = Annotated[Path | None, typer.Option(help="File with the token; or set ASYPPO_FLEET_TOKEN.")]
TlsCa = Annotated[
    Path | None, typer.Option(help="PEM of the authority of the servers' certificates: use TLS.")
]
TlsCert = Annotated[Path | None, typer.Option(help="PEM of your own certificate, where servers ask for one.")]
TlsKey = Annotated[Path | None, typer.Option(help="PEM of its key.")]


@app.command()
def status(
    addresses: Addresses,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
    checksums: Annotated[
        bool, typer.Option("--checksums", help="XXH3-64 of every tensor that the engine was given.")
    ] = False,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="How long a server may take to answer.")] = 5.0,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """State, version, load and speed of servers. Exit code 1 if one does not answer, or checksums disagree."""
    from asyppo_async.errors import FleetError
    from asyppo_async.fleet import checksums as sums
    from asyppo_async.fleet import operate

    answers: Mapping[str, object]
    with _errors():
        security = _security(token_file, tls_ca, tls_cert, tls_key)
        if checksums:
            answers = loaded = asyncio.run(sums.ask(addresses, security, timeout_s))
            text, table = sums.as_json(loaded), sums.view(loaded)
        else:
            answers = found = asyncio.run(operate.status(addresses, security, timeout_s))
            text, table = operate.status_json(found), operate.status_view(found)
    if as_json:
        print(text)
    else:
        Console(highlight=False).print(table)
    silent = any(isinstance(answer, FleetError) for answer in answers.values())
    if silent or (checksums and sums.disagreements(loaded)):
        sys.exit(1)


@app.command()
def watch(
    addresses: Addresses,
    interval_s: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """The same, live, until Ctrl-C; a server that is lost is looked for again."""
    from asyppo_async.fleet import operate

    with _errors(), contextlib.suppress(KeyboardInterrupt):
        security = _security(token_file, tls_ca, tls_cert, tls_key)
        asyncio.run(operate.watch(addresses, security, interval_s, Console(highlight=False)))


@app.command()
def drain(
    addresses: Addresses,
    grace_s: Annotated[
        float | None, typer.Option(min=0, help="For what runs; default: what the server was started with.")
    ] = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="For the servers to be gone.")] = 120.0,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Let servers finish what runs, take nothing new, and end. Waits until they are gone."""
    from asyppo_async.fleet import operate

    with _errors():
        failures = asyncio.run(
            operate.drain(
                addresses,
                _security(token_file, tls_ca, tls_cert, tls_key),
                grace_s=grace_s,
                deadline_s=timeout_s,
                console=Console(highlight=False),
            )
        )
    for failure in failures:
        typer.echo(f"error: {failure}", err=True)
    if failures:
        sys.exit(1)


@app.command()
def bench(
    addresses: Addresses,
    calls: Annotated[int, typer.Option(min=1, help="Calls under way at once.")] = 16,
    num_samples: Annotated[int, typer.Option(min=1, help="Samples of each call.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of each prompt, made by chance.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of each response.")] = 256,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long new calls are begun.")] = 20.0,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """How much running servers make, asked as a trainer asks. The last line is one JSON object."""
    import json

    from asyppo_async.fleet import bench as benchmark

    load = benchmark.BenchLoad(
        calls_at_once=calls,
        num_samples=num_samples,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        seconds=seconds,
    )
    with _errors():
        security = _security(token_file, tls_ca, tls_cert, tls_key)
        report = asyncio.run(benchmark.bench(addresses, security, load))
    print(json.dumps(report.figures()))
    if report.num_failed_calls:
        sys.exit(1)


@app.command()
@with_settings(("model", "host", "port", "max_model_len", "kv_cache_gib"))
def doctor(values: dict[str, Any]) -> None:
    """What this machine has and lacks for serving a model. Exit code 1 if a server would not start."""
    from asyppo_async.fleet.doctor import examine

    with _errors():
        findings = examine(_serve_config(values))
    for finding in findings:
        advice = f" -> {finding.advice}" if finding.advice else ""
        print(f"{finding.level:7}  {finding.what}{advice}")
    if any(finding.level == "error" for finding in findings):
        sys.exit(1)


def _security(*files: Path | None) -> "ClientSecurity":
    from asyppo_async.rpc.security import client_security

    token_file, ca_file, certificate_file, key_file = files
    return client_security(
        token_file=token_file, ca_file=ca_file, certificate_file=certificate_file, key_file=key_file
    )


def _serve_config(values: dict[str, Any]) -> ServeConfig:
    try:
        return ServeConfig.model_validate(values)
    except ValidationError as error:
        _fail("; ".join(_describe(dict(each)) for each in error.errors()))


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """An error of ours becomes one line and exit code 1."""
    try:
        yield
    except AsyppoError as error:
        _fail(str(error))


def _serve(config: ServeConfig) -> None:
    import uvloop

    from asyppo_async.fleet.engine.vllm_engine import open_vllm_engine
    from asyppo_async.fleet.serve import serve as serve_until_stopped
    from asyppo_async.fleet.stop import listening_for_signals

    async def run() -> None:
        with listening_for_signals() as stop:
            await serve_until_stopped(config, open_vllm_engine, stop)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def _describe(error: dict[str, Any]) -> str:
    flag = "".join(f"--{str(part).replace('_', '-')}: " for part in error["loc"])
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{flag}{message}" + (f", got {error['input']!r}" if error["loc"] else "")


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    sys.exit(1)


def main() -> None:
    app()
