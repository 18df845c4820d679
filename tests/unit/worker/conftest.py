"""A tiny model and a small batch."""

from pathlib import Path

import pytest

from asyppo_async.types import TokenSequences
from tests.unit.worker.learners import random_sequences, write_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def sequences() -> TokenSequences:
    return random_sequences(3, 9)
