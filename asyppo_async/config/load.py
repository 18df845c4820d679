"""From a TOML file, a preset and `--set` overrides to a checked `TrainConfig`, and back to TOML.

Order: defaults < preset < file < overrides. Torch-free: `--help` and a wrong key cost no import of torch.
"""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TypeAlias, cast, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from asyppo_async.config.checks import check_config
from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import ConfigError

Tree: TypeAlias = dict[str, object]


def preset_names() -> list[str]:
    """Names that `preset = "..."` takes."""
    files = resources.files("asyppo_async.config.presets").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read and check a run's configuration.

    Args:
        path: The TOML file; it may name a preset with a top-level `preset = "..."`.
        overrides: `section.key=value` strings; the value is TOML, or a bare string.

    Raises:
        ConfigError: The file is missing or broken, or a key or value is wrong; one line, naming the key.
    """
    try:
        tree = cast(Tree, tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {path}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; name the TOML file of the run") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    return config_from_tree(tree, overrides, source=str(path))


def config_from_tree(tree: Tree, overrides: Sequence[str] = (), source: str = "config") -> TrainConfig:
    """Like `load_config`, from a parsed tree."""
    tree = dict(tree)
    for override in overrides:
        tree = _merge(tree, _parse_override(override))
    preset = tree.pop("preset", None)
    if preset is not None:
        tree = _merge(load_preset(str(preset)), tree)
    try:
        config = TrainConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_explain(error)}") from None
    check_config(config, source)
    return config


def dump_config(config: TrainConfig) -> str:
    """The resolved configuration as TOML; loading it gives an equal `TrainConfig`."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def load_preset(name: str) -> Tree:
    """What a preset says, with what it builds on."""
    file = resources.files("asyppo_async.config.presets") / f"{name}.toml"
    if not file.is_file():
        raise ConfigError(f"unknown preset {name!r}{_nearest(name, preset_names())}")
    tree = cast(Tree, tomllib.loads(file.read_text(encoding="utf-8")))
    base = tree.pop("preset", None)  # a preset may say only how it differs from another one
    return tree if base is None else _merge(load_preset(str(base)), tree)


def _merge(base: Tree, over: Mapping[str, object]) -> Tree:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[key] = _merge(cast(Tree, old), cast(Tree, value))
        else:
            merged[key] = value
    return merged


def _parse_override(text: str) -> Tree:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set takes section.key=value, got {text!r}")
    try:
        leaf: object = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        leaf = value.strip()  # a bare word or path: quoting it for the shell and for TOML would be a nuisance
    for part in reversed(key.strip().split(".")):
        leaf = {part: leaf}
    return cast(Tree, leaf)


def _explain(error: ValidationError) -> str:
    details = error.errors()
    first = _explain_one(details[0])
    return first if len(details) == 1 else f"{first} (and {len(details) - 1} more)"


def _explain_one(detail: ErrorDetails) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"unknown key {key!r}{_nearest_key(detail)}"
    if detail["type"] == "missing":
        return f"{key!r} is missing"
    return f"{key}: {detail['msg']}, got {detail['input']!r}"


def _nearest_key(detail: ErrorDetails) -> str:
    *parents, wrong = [str(part) for part in detail["loc"]]
    model: type[BaseModel] = TrainConfig
    for parent in parents:
        if parent.isdecimal():
            continue  # an entry of a list of tables
        annotation = model.model_fields[parent].annotation
        annotation = get_args(annotation)[0] if get_origin(annotation) is tuple else annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return ""
        model = annotation
    near = _nearest(wrong, list(model.model_fields))
    if near:
        return near
    elsewhere = [
        f"{section}.{key}"
        for section, field in TrainConfig.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        for key in field.annotation.model_fields
        if key == wrong
    ]
    return f"; did you mean {elsewhere[0]!r}?" if elsewhere else f"; known: {', '.join(model.model_fields)}"


def _nearest(wrong: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(wrong, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
