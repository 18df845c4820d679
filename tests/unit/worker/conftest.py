"""A tiny model and a small batch."""

from pathlib import Path

import pytest
import torch

from asyppo_async.types import TokenSequences
from tests.unit.worker.learners import random_sequences, write_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny tensors gain nothing from a second thread, and on a busy machine they wait for it."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def sequences() -> TokenSequences:
    return random_sequences(3, 9)
