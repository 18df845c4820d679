"""What a trainer and a server compare to see that they mean the same model and the same tokenizer."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from asyppo_async.errors import ConfigError

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

# What decides shapes or arithmetic. Named one by one, since every release of transformers writes further fields (and
# defaults) into a config that it saves again.
_ARCHITECTURE_FIELDS = (
    "architectures",
    "attention_bias",
    "decoder_sparse_step",
    "first_k_dense_replace",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "kv_lora_rank",
    "mlp_bias",
    "mlp_only_layers",
    "model_type",
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_local_experts",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "rms_norm_eps",
    "routed_scaling_factor",
    "shared_expert_intermediate_size",
    "tie_word_embeddings",
    "v_head_dim",
    "vocab_size",
)
_TOKENIZER_FILES = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")
_LENGTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """A model folder, as far as the two ends must agree on it."""

    model_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    """Rows of the output head."""
    eos_token_ids: tuple[int, ...]
    """Every id that ends a response, ascending: of the config, the generation config and the tokenizer.

    A chat model often names another one in each of the three, and a response that runs past any of them is one that
    nobody asked for.
    """
    max_positions: int
    """Longest sequence that the model was made for."""


def model_identity(folder: Path) -> ModelIdentity:
    """Read both ends' part of the comparison from a model folder.

    Raises:
        ConfigError: a file is missing, unreadable, or lacks the vocabulary or the number of positions.
    """
    config = _read_object(folder / "config.json")
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else config
    eos = {*_ids(config.get("eos_token_id")), *_ids(inner.get("eos_token_id"))}
    if (folder / "generation_config.json").is_file():
        eos.update(_ids(_read_object(folder / "generation_config.json").get("eos_token_id")))
    eos.update(_tokenizer_eos(folder))
    return ModelIdentity(
        model_fingerprint=model_fingerprint(folder),
        tokenizer_fingerprint=tokenizer_fingerprint(folder),
        vocab_size=_whole_number(inner, "vocab_size", folder),
        eos_token_ids=tuple(sorted(eos)),
        max_positions=_whole_number(inner, "max_position_embeddings", folder),
    )


def model_fingerprint(folder: Path) -> str:
    """Hash of the architecture fields of `config.json`; equal for every checkpoint of one architecture.

    Raises:
        ConfigError: the folder has no readable `config.json`.
    """
    config = _read_object(folder / "config.json")
    text = config.get("text_config")
    if isinstance(text, dict):
        config = {**text, "architectures": config.get("architectures")}
    fields = {name: config[name] for name in _ARCHITECTURE_FIELDS if config.get(name) is not None}
    fields["rope"] = _rope(config)
    return _hash_of(fields)


def quantization(folder: Path) -> str:
    """Method by which the checkpoint's weights are quantized; empty: they are not.

    Raises:
        ConfigError: the folder has no readable `config.json`.
    """
    settings = _read_object(folder / "config.json").get("quantization_config")
    if not settings:
        return ""
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    return str(method or "of an unnamed kind")


def tokenizer_fingerprint(folder: Path) -> str:
    """Hash of the tokenizer's vocabulary and rules (not of its padding, truncation or chat template).

    Raises:
        ConfigError: the folder has no tokenizer files, or an unreadable one.
    """
    fast = folder / "tokenizer.json"
    if fast.is_file():
        return _hash_of(_tokenizer_rules(_read_object(fast)))
    present = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if not present:
        raise ConfigError(f"{folder} holds no tokenizer (tokenizer.json, {', '.join(_TOKENIZER_FILES)})")
    digest = hashlib.sha256()
    for path in present:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:_LENGTH]


def _ids(value: Json) -> list[int]:
    """`eos_token_id` is a number, a list of numbers, or absent."""
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)]


def _tokenizer_eos(folder: Path) -> set[int]:
    if not ((folder / "tokenizer_config.json").is_file() and (folder / "tokenizer.json").is_file()):
        return set()
    token = _read_object(folder / "tokenizer_config.json").get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        return set()
    rules = _read_object(folder / "tokenizer.json")
    added, model = rules.get("added_tokens"), rules.get("model")
    found = {
        token.get("id")
        for token in (added if isinstance(added, list) else [])
        if isinstance(token, dict) and token.get("content") == content
    }
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        found.add(vocabulary.get(content))
    return {item for item in found if isinstance(item, int)}


def _whole_number(config: dict[str, Json], name: str, folder: Path) -> int:
    value = config.get(name)
    if not isinstance(value, int):
        raise ConfigError(f"{folder}/config.json has no {name}, got {value!r}")
    return value


def _rope(config: dict[str, Json]) -> Json:
    """Rotary parameters, which older configs keep in two fields and newer ones in `rope_parameters`."""
    parameters: Json = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        return parameters
    merged = dict(parameters)
    merged.setdefault("rope_theta", config.get("rope_theta"))
    merged.setdefault("rope_type", merged.pop("type", "default"))
    merged.pop("type", None)
    return {name: value for name, value in merged.items() if value is not None}


def _tokenizer_rules(tokenizer: dict[str, Json]) -> Json:
    model = tokenizer.get("model")
    model = dict(model) if isinstance(model, dict) else {}
    merges = model.get("merges")
    if isinstance(merges, list):
        # "a b" before tokenizers 0.20, ["a", "b"] since.
        model["merges"] = [
            " ".join(map(str, merge)) if isinstance(merge, list) else merge for merge in merges
        ]
    added = tokenizer.get("added_tokens")
    ids: list[Json] = [
        [token.get("id"), token.get("content"), token.get("special")]
        for token in (added if isinstance(added, list) else [])
        if isinstance(token, dict)
    ]
    return {
        "model": {
            name: model.get(name)
            for name in ("type", "vocab", "merges", "unk_token", "byte_fallback")
            if name in model
        },
        "added_tokens": ids,
        "normalizer": tokenizer.get("normalizer"),
        "pre_tokenizer": tokenizer.get("pre_tokenizer"),
    }


def _read_object(path: Path) -> dict[str, Json]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return cast(dict[str, Json], content)


def _hash_of(value: Json) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]
