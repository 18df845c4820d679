"""Real worker processes on loopback, over real ZMQ and torch.distributed."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asyppo_async.config.critic import CriticSection
from asyppo_async.config.sections import ActorSection
from asyppo_async.trainer.worker.clients import ActorGroup, CriticGroup
from asyppo_async.trainer.worker.group import open_groups
from asyppo_async.trainer.worker.specs import GroupSpec, GroupTimes, specs_of
from asyppo_async.types import TokenSequences
from tests.unit.worker.learners import random_sequences, write_model

TIMES = GroupTimes(join_timeout_s=60, request_timeout_s=30, silent_after_s=8)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny tensors gain nothing from a second thread, and on a busy machine they wait for it."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("tiny"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture(scope="session")
def sequences() -> TokenSequences:
    return random_sequences(3, 9)


@pytest.fixture(scope="module")
async def groups(
    tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[ActorGroup, tuple[CriticGroup, ...]]]:
    """An actor of two ranks and two critics of one."""
    async with open_groups(
        actor=ActorSection(model=tiny_folder, num_ranks=2, num_threads=1, learning_rate=1e-3),
        critic=CriticSection(model=tiny_folder, num_threads=1, learning_rate=1e-3),
        seed=1,
        bucket_bytes=2048,
        folder=tmp_path_factory.mktemp("run"),
        times=TIMES,
    ) as opened:
        yield opened


def actor_spec(model: Path, *, num_ranks: int = 1, num_local_ranks: int | None = None) -> GroupSpec:
    """The spec of an actor alone."""
    (spec, _) = specs_of(
        ActorSection(model=model, num_ranks=num_ranks, num_threads=1),
        CriticSection(model=model, count=1),
        seed=0,
        bucket_bytes=2048,
        times=TIMES,
    )
    return replace(spec, num_local_ranks=num_ranks if num_local_ranks is None else num_local_ranks)
