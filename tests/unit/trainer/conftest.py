"""A model folder of random weights, for what reads one before anything is started."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`actor` and `critic`; a vocabulary of digits, no chat template, 512 positions."""
    folder = tmp_path_factory.mktemp("tiny")
    spec = importlib.util.spec_from_file_location("tiny_warmup", ROOT / "examples" / "tiny_warmup.py")
    assert spec is not None and spec.loader is not None
    warmup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(warmup)
    torch.manual_seed(0)
    actor = warmup.new_actor()
    warmup.save(actor, warmup.first_layers(actor, 2), folder)
    return folder


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
