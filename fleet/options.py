"""Command-line options that are settings: names, types, defaults and help come from the configuration alone."""

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, get_origin

import typer
from pydantic.fields import FieldInfo

from asyppo_async.config.serve import ServeConfig


def with_settings(
    fields: Sequence[str] = tuple(ServeConfig.model_fields),
) -> Callable[[Callable[[dict[str, Any]], None]], Callable[..., None]]:
    """A command whose options are these fields of `ServeConfig`; it gets their values as one mapping."""

    def wrap(command: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            command(values)

        options = [_option(name, ServeConfig.model_fields[name]) for name in fields]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {option.name: option.annotation for option in options}
        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        return run

    return wrap


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    kind, extra = field.annotation, dict[str, Any]()
    if get_origin(kind) is Literal:
        extra["metavar"], kind = "<name>", str  # a list of all names here would cut long options off
    flag = f"--{name.replace('_', '-')}"
    flags = [flag, f"--no-{flag[2:]}"] if kind is bool and field.default is True else [flag]
    extra["show_default"] = not field.is_required() and field.default is not None
    option = typer.Option("/".join(flags), help=(field.description or "").replace("[", "\\["), **extra)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if field.is_required() else field.default,
        annotation=Annotated[kind, option],
    )
