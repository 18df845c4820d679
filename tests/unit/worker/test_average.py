"""The moving average of the actor's weights: what it is, what it is saved with, and a KL reference that follows it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from asyppo_async.errors import CheckpointError
from asyppo_async.trainer.worker.control import RestoreState, SaveState, WorkerSettings
from asyppo_async.trainer.worker.messages import ActorForward, ActorForwardResult, Save
from asyppo_async.trainer.worker.model import load_policy
from asyppo_async.trainer.worker.rank import Rank, answer, open_rank
from asyppo_async.trainer.worker.world import World
from asyppo_async.types import Float32Array, TokenSequences
from tests.unit.worker.learners import actor_request
from tests.unit.worker.test_rank_state import settings_of, train, weights

DECAY = 0.9


def settings(folder: Path, dtype: str = "float32", **changes: object) -> WorkerSettings:
    return replace(settings_of(folder, "actor", dtype), ema_decay=DECAY, **changes)  # type: ignore[arg-type]


def open_actor_rank(folder: Path, dtype: str = "float32", **changes: object) -> Rank:
    return open_rank(settings(folder, dtype, **changes), World.alone(), "cpu")


def averages(rank: Rank) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in rank.state._backend.averages()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_average_when_steps_are_made_follows_the_masters_in_float32_and_is_resumed_bit_for_bit(
    tiny_folder: Path, sequences: TokenSequences, tmp_path: Path, dtype: str
) -> None:
    rank = open_actor_rank(tiny_folder, dtype)
    expected = {name: value.double() for name, value in weights(rank).items()}
    for step in range(4):
        if step == 2:
            answer(rank, SaveState(folder=str(tmp_path / "state")))
        train(rank, "actor", sequences)
        for name, value in weights(rank).items():
            expected[name] = DECAY * expected[name] + (1 - DECAY) * value.double()
    found = averages(rank)
    for name, value in expected.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name].double(), value, rtol=1e-6, atol=1e-7)

    again = open_actor_rank(tiny_folder, dtype)
    answer(again, RestoreState(folder=str(tmp_path / "state")))
    for _ in range(2):
        train(again, "actor", sequences)
    assert all(torch.equal(value, found[name]) for name, value in averages(again).items())


def test_average_when_no_step_is_finite_stays(tiny_folder: Path, sequences: TokenSequences) -> None:
    rank = open_actor_rank(tiny_folder)
    train(rank, "actor", sequences)
    before = averages(rank)
    train(rank, "actor", sequences, broken=True)
    assert all(torch.equal(value, before[name]) for name, value in averages(rank).items())


def test_model_when_it_is_restored_as_its_average_is_saved_as_such(
    tiny_folder: Path, sequences: TokenSequences, tmp_path: Path
) -> None:
    rank = open_actor_rank(tiny_folder)
    train(rank, "actor", sequences)
    answer(rank, SaveState(folder=str(tmp_path / "state")))
    other = open_rank(settings_of(tiny_folder, "actor", "float32"), World.alone(), "cpu")
    answer(other, RestoreState(folder=str(tmp_path / "state"), average=True))
    answer(other, Save(folder=str(tmp_path / "model")))
    saved = dict(load_policy(tmp_path / "model", "float32").module.named_parameters())
    moved = weights(rank)
    for name, value in averages(rank).items():
        assert torch.equal(saved[name].detach(), value) and not torch.equal(value, moved[name])


def test_average_when_the_saved_run_had_none_starts_at_its_weights_and_cannot_be_restored(
    tiny_folder: Path, sequences: TokenSequences, tmp_path: Path
) -> None:
    without = open_rank(settings_of(tiny_folder, "actor", "float32"), World.alone(), "cpu")
    train(without, "actor", sequences)
    answer(without, SaveState(folder=str(tmp_path / "state")))
    rank = open_actor_rank(tiny_folder)
    with pytest.raises(CheckpointError, match=r"no average of the weights: actor\.ema_decay was 0"):
        answer(rank, RestoreState(folder=str(tmp_path / "state"), average=True))
    answer(rank, RestoreState(folder=str(tmp_path / "state")))
    assert all(torch.equal(value, weights(rank)[name]) for name, value in averages(rank).items())


def reference_logprobs(rank: Rank, sequences: TokenSequences) -> Float32Array:
    result = answer(rank, ActorForward(sequences=sequences, temperature=1.0, with_reference=True))
    assert isinstance(result, ActorForwardResult) and result.reference_logprobs is not None
    return result.reference_logprobs


def test_reference_when_it_is_the_average_follows_it_over_steps_and_a_resume(
    tiny_folder: Path, sequences: TokenSequences, tmp_path: Path
) -> None:
    rank = open_actor_rank(tiny_folder, reference=str(tiny_folder), moving_reference=True)
    start = reference_logprobs(rank, sequences)
    answer(rank, actor_request(sequences, [5, 4]))
    moved = reference_logprobs(rank, sequences)
    assert np.abs(moved - start).max() > 1e-4
    answer(rank, SaveState(folder=str(tmp_path / "state")))

    averaged = open_actor_rank(tiny_folder, reference=str(tiny_folder), moving_reference=False)
    answer(averaged, RestoreState(folder=str(tmp_path / "state"), average=True))
    result = answer(averaged, ActorForward(sequences=sequences, temperature=1.0))
    assert isinstance(result, ActorForwardResult)
    np.testing.assert_array_equal(result.logprobs, moved)

    again = open_actor_rank(tiny_folder, reference=str(tiny_folder), moving_reference=True)
    answer(again, RestoreState(folder=str(tmp_path / "state")))
    np.testing.assert_array_equal(reference_logprobs(again, sequences), moved)
