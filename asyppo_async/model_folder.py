"""What both ends read from a model folder in Hugging Face format, without torch."""

import json
from pathlib import Path
from typing import cast

from asyppo_async.errors import ConfigError


def check_model_folder(folder: Path, key: str) -> None:
    """Raise `ConfigError` naming `key` unless `folder` holds a model with its weights."""
    if not folder.is_dir():
        raise ConfigError(f"{key}: there is no model folder {folder}")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{key}: {folder} is no model folder, it has no config.json")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{key}: {folder} has no *.safetensors weights")


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Every id that ends a response, sorted: of the model's config, its generation config and its tokenizer.

    A chat model often names another one in each of the three, and a response that runs past any of them is a
    response that the user did not ask for.
    """
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = _read(folder / name).get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        found.update(item for item in values if isinstance(item, int))
    token = _read(folder / "tokenizer_config.json").get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if isinstance(content, str):
        found.update(_ids_of(_read(folder / "tokenizer.json"), content))
    return tuple(sorted(found))


def vocab_size(folder: Path) -> int:
    """Rows of the embedding, as `config.json` says."""
    config = _read(folder / "config.json")
    text = config.get("text_config")
    size = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    if not isinstance(size, int):
        raise ConfigError(f"{folder / 'config.json'} names no vocab_size")
    return size


def max_model_len(folder: Path) -> int:
    """Longest prompt plus response, in tokens, that the model was made for."""
    length = _read(folder / "config.json").get("max_position_embeddings")
    if not isinstance(length, int):
        raise ConfigError(f"{folder / 'config.json'} names no max_position_embeddings")
    return length


def _ids_of(tokenizer: dict[str, object], content: str) -> set[int]:
    added = tokenizer.get("added_tokens")
    ids = {
        token["id"]
        for token in (added if isinstance(added, list) else [])
        if isinstance(token, dict) and token.get("content") == content
    }
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict) and isinstance(vocabulary.get(content), int):
        ids.add(vocabulary[content])
    return ids


def _read(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        return cast(dict[str, object], json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
