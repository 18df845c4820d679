import json
from pathlib import Path

import pytest

from asyppo_async.errors import ConfigError
from asyppo_async.fingerprint import model_fingerprint, tokenizer_fingerprint

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "rope_theta": 1e6,
    "sliding_window": None,
}
TOKENIZER = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
    "added_tokens": [{"id": 3, "content": "<eos>", "special": True, "lstrip": False}],
    "truncation": None,
}


def fingerprint_of_model(folder: Path, config: dict[str, object]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return model_fingerprint(folder)


def fingerprint_of_tokenizer(folder: Path, tokenizer: dict[str, object]) -> str:
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return tokenizer_fingerprint(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"transformers_version": "5.19", "dtype": "float32", "use_cache": False},
        {"eos_token_id": [1, 2], "_name_or_path": "elsewhere"},
        {"head_dim": None},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    ],
)
def test_model_fingerprint_when_the_architecture_is_the_same_then_it_is_equal(
    tmp_path: Path, change: dict[str, object]
) -> None:
    assert fingerprint_of_model(tmp_path, CONFIG) == fingerprint_of_model(tmp_path, {**CONFIG, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 129},
        {"num_hidden_layers": 5},
        {"architectures": ["LlamaForCausalLM"]},
        {"rope_theta": 1e4},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"tie_word_embeddings": True},
    ],
)
def test_model_fingerprint_when_the_architecture_differs_then_it_differs(
    tmp_path: Path, change: dict[str, object]
) -> None:
    assert fingerprint_of_model(tmp_path, CONFIG) != fingerprint_of_model(tmp_path, {**CONFIG, **change})


def test_model_fingerprint_when_the_text_part_is_nested_then_it_counts(tmp_path: Path) -> None:
    nested = {"architectures": ["Wrapper"], "text_config": CONFIG}
    changed = {"architectures": ["Wrapper"], "text_config": {**CONFIG, "hidden_size": 1}}
    assert fingerprint_of_model(tmp_path, nested) != fingerprint_of_model(tmp_path, changed)


def test_tokenizer_fingerprint_when_written_by_another_release_then_it_is_equal(tmp_path: Path) -> None:
    newer = {
        **TOKENIZER,
        "model": {**TOKENIZER["model"], "merges": [["a", "b"]], "dropout": None},  # type: ignore[dict-item]
        "truncation": {"max_length": 5},
    }
    assert fingerprint_of_tokenizer(tmp_path, TOKENIZER) == fingerprint_of_tokenizer(tmp_path, newer)


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ba": 2}, "merges": ["a b"]}},
        {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["b a"]}},
        {"added_tokens": []},
        {"pre_tokenizer": {"type": "Whitespace"}},
    ],
)
def test_tokenizer_fingerprint_when_vocabulary_or_rules_differ_then_it_differs(
    tmp_path: Path, change: dict[str, object]
) -> None:
    assert fingerprint_of_tokenizer(tmp_path, TOKENIZER) != fingerprint_of_tokenizer(
        tmp_path, {**TOKENIZER, **change}
    )


def test_tokenizer_fingerprint_when_there_are_only_slow_files_then_their_content_counts(
    tmp_path: Path,
) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    before = tokenizer_fingerprint(tmp_path)
    (tmp_path / "merges.txt").write_text("a b")
    assert tokenizer_fingerprint(tmp_path) != before


def test_fingerprints_when_the_folder_is_empty_then_they_say_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        model_fingerprint(tmp_path)
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        tokenizer_fingerprint(tmp_path)
