"""`asyppo-fleet`: parse first, import what is heavy after."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from asyppo_async.config.serve import ServeConfig
from asyppo_async.errors import AsyppoError
from asyppo_async.logs import set_up_logging

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


def _option(field: str, *flags: str, **extra: Any) -> Any:
    """An option whose help is the description of its setting; defaults live in the configuration alone."""
    return typer.Option(*flags, help=ServeConfig.model_fields[field].description, **extra)


def _default(field: str) -> Any:
    return ServeConfig.model_fields[field].default


@app.command()
def serve(
    model: Annotated[Path, _option("model", "--model", show_default=False)],
    host: Annotated[str, _option("host", "--host")] = _default("host"),
    port: Annotated[int, _option("port", "--port")] = _default("port"),
    insecure: Annotated[bool, _option("insecure", "--insecure")] = _default("insecure"),
    ready_file: Annotated[Path | None, _option("ready_file", "--ready-file")] = None,
    dtype: Annotated[str, _option("dtype", "--dtype", metavar="[float32|bfloat16]")] = _default("dtype"),
    max_num_seqs: Annotated[int, _option("max_num_seqs", "--max-num-seqs")] = _default("max_num_seqs"),
    max_model_len: Annotated[int, _option("max_model_len", "--max-model-len")] = _default("max_model_len"),
    kv_cache_gib: Annotated[float, _option("kv_cache_gib", "--kv-cache-gib")] = _default("kv_cache_gib"),
    num_threads: Annotated[int, _option("num_threads", "--num-threads")] = _default("num_threads"),
    tensor_parallel_size: Annotated[
        int, _option("tensor_parallel_size", "--tensor-parallel-size")
    ] = _default("tensor_parallel_size"),
    probe_slots: Annotated[int, _option("probe_slots", "--probe-slots")] = _default("probe_slots"),
    max_queued_samples: Annotated[int, _option("max_queued_samples", "--max-queued-samples")] = _default(
        "max_queued_samples"
    ),
    stream_interval: Annotated[int, _option("stream_interval", "--stream-interval")] = _default(
        "stream_interval"
    ),
    drain_grace_s: Annotated[float, _option("drain_grace_s", "--drain-grace-s")] = _default("drain_grace_s"),
) -> None:
    """Serve one model: generation and weight updates over gRPC.

    SIGTERM or Ctrl-C lets running requests finish within the grace, a second signal ends the server at once.
    """
    try:
        config = ServeConfig.model_validate(locals())
    except ValidationError as error:
        _fail("; ".join(_describe(dict(each)) for each in error.errors()))
    set_up_logging()
    try:
        _serve(config)
    except AsyppoError as error:
        _fail(str(error))


def _serve(config: ServeConfig) -> None:
    import uvloop

    from asyppo_async.fleet.engine.vllm_engine import open_vllm_engine
    from asyppo_async.fleet.serve import listening_for_signals
    from asyppo_async.fleet.serve import serve as serve_until_stopped

    async def run() -> None:
        with listening_for_signals() as stop:
            await serve_until_stopped(config, open_vllm_engine, stop)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def _describe(error: dict[str, Any]) -> str:
    flag = "".join(f"--{str(part).replace('_', '-')}: " for part in error["loc"])
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{flag}{message}" + (f", got {error['input']!r}" if error["loc"] else "")


def _fail(message: str) -> None:
    typer.echo(f"error: {message}", err=True)
    sys.exit(1)


def main() -> None:
    app()
