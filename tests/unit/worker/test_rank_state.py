"""A rank that is restored goes on as the one that was saved: bit for bit, schedule, moments and budget included."""

import random
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from asyppo_async.config.critic import CriticSection
from asyppo_async.config.sections import ActorSection
from asyppo_async.errors import CheckpointError
from asyppo_async.trainer.worker.control import RestoreState, SaveState, SeeFolder, WorkerSettings
from asyppo_async.trainer.worker.rank import Rank, answer, open_rank
from asyppo_async.trainer.worker.specs import GroupTimes, specs_of
from asyppo_async.trainer.worker.world import World
from asyppo_async.types import TokenSequences
from tests.unit.worker.learners import actor_request, critic_request, write_model

TIMES = GroupTimes(join_timeout_s=1, request_timeout_s=1, silent_after_s=1)


def settings_of(folder: Path, role: str, dtype: str) -> WorkerSettings:
    actor, critic = specs_of(
        ActorSection(model=folder, learning_rate=1e-2, learning_rate_warmup_steps=5),
        CriticSection(model=folder, count=1, learning_rate=1e-2, learning_rate_warmup_steps=5),
        seed=0,
        bucket_bytes=2048,
        times=TIMES,
    )
    return replace((actor if role == "actor" else critic).settings, dtype=dtype)


def train(rank: Rank, role: str, sequences: TokenSequences, *, broken: bool = False) -> None:
    nothing = np.full(sequences.num_response_tokens, np.nan, dtype=np.float32)
    if role == "actor":
        changes = {"advantages": nothing} if broken else {}
        answer(rank, actor_request(sequences, [5, 4], **changes))
    else:
        changes = {"targets": nothing} if broken else {}
        answer(rank, critic_request(sequences, [5, 4], **changes))


def weights(rank: Rank) -> dict[str, torch.Tensor]:
    backend = rank.state._backend
    masters = dict(zip(backend._names, backend._masters, strict=True))  # type: ignore[attr-defined]
    return {name: master.detach().clone() for name, master in masters.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_rank_restored_trains_on_bit_for_bit(
    tiny_folder: Path, sequences: TokenSequences, tmp_path: Path, role: str, dtype: str
) -> None:
    settings = settings_of(tiny_folder, role, dtype)
    rank = open_rank(settings, World.alone(), "cpu")
    train(rank, role, sequences)
    train(rank, role, sequences, broken=True)
    random.seed(3)
    np.random.seed(4)
    torch.manual_seed(5)
    answer(rank, SaveState(folder=str(tmp_path / "actor")))
    drawn = random.random(), np.random.random(), float(torch.rand(()))
    train(rank, role, sequences)

    again = open_rank(settings, World.alone(), "cpu")
    train(again, role, sequences)  # whatever it was before
    answer(again, RestoreState(folder=str(tmp_path / "actor")))
    assert (random.random(), np.random.random(), float(torch.rand(()))) == drawn
    assert again.state._stepper.num_non_finite == 2
    train(again, role, sequences)
    expected, got = weights(rank), weights(again)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert not any(path.suffix in (".pt", ".pkl", ".bin") for path in (tmp_path / "actor").iterdir())


def test_rank_when_the_state_is_of_another_model_says_so(tiny_folder: Path, tmp_path: Path) -> None:
    answer(
        open_rank(settings_of(tiny_folder, "actor", "float32"), World.alone(), "cpu"),
        SaveState(folder=str(tmp_path / "state")),
    )
    other = write_model(tmp_path / "other", num_hidden_layers=3)
    rank = open_rank(settings_of(other, "actor", "float32"), World.alone(), "cpu")
    with pytest.raises(CheckpointError, match=r"state lacks \d+ weights, model\.layers\.2"):
        answer(rank, RestoreState(folder=str(tmp_path / "state")))
    with pytest.raises(CheckpointError, match="nowhere"):
        answer(rank, RestoreState(folder=str(tmp_path / "nowhere")))


def test_rank_when_the_disk_is_full_says_so_and_goes_on(
    tiny_folder: Path, sequences: TokenSequences, tmp_path: Path
) -> None:
    rank = open_rank(settings_of(tiny_folder, "actor", "float32"), World.alone(), "cpu")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"rank 0 cannot write into .*File too large"):
            answer(rank, SaveState(folder=str(tmp_path / "state")))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    train(rank, "actor", sequences)


def test_rank_sees_the_folder_of_the_run_or_says_that_it_does_not(tiny_folder: Path, tmp_path: Path) -> None:
    rank = open_rank(settings_of(tiny_folder, "actor", "float32"), World.alone(), "cpu")
    (tmp_path / "nonce").write_text("abc")
    answer(rank, SeeFolder(folder=str(tmp_path), nonce="abc"))
    assert (tmp_path / "rank-0").read_text() == "abc"
    with pytest.raises(CheckpointError, match="it holds the nonce of another run"):
        answer(rank, SeeFolder(folder=str(tmp_path), nonce="xyz"))
    with pytest.raises(CheckpointError, match=r"rank 0 cannot use .*elsewhere: No such file"):
        answer(rank, SeeFolder(folder=str(tmp_path / "elsewhere"), nonce="abc"))
