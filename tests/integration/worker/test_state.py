"""What real groups save, new processes restore: training goes on as if nothing had happened."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asyppo_async.config.critic import CriticSection
from asyppo_async.config.learner import TrainingBackend, ZeroStage
from asyppo_async.config.sections import ActorSection
from asyppo_async.errors import CheckpointError
from asyppo_async.trainer.worker.clients import ActorGroup, CriticGroup
from asyppo_async.trainer.worker.group import open_groups
from asyppo_async.trainer.worker.group_state import check_folder_is_seen
from asyppo_async.trainer.worker.messages import ActorForward, CriticForward, TrainResult
from asyppo_async.types import Float32Array, TokenSequences
from tests.integration.worker.conftest import TIMES
from tests.integration.worker.test_groups import assert_same_steps
from tests.unit.worker.learners import actor_request, critic_request, open_actor, open_critic

Groups = tuple[ActorGroup, CriticGroup]


@asynccontextmanager
async def opened(
    model: Path,
    folder: Path,
    backend: TrainingBackend,
    stage: ZeroStage,
    num_ranks: int = 2,
    rate: float = 1e-2,
    warmup_steps: int = 7,
) -> AsyncIterator[Groups]:
    async with open_groups(
        actor=ActorSection(
            model=model,
            backend=backend,
            zero_stage=stage,
            zero_whole_below=0,
            num_ranks=num_ranks,
            num_threads=1,
            learning_rate=rate,
            learning_rate_warmup_steps=warmup_steps,
        ),
        critic=CriticSection(
            model=model,
            count=1,
            backend=backend,
            zero_stage=stage,
            zero_whole_below=0,
            num_ranks=num_ranks // 2,
            num_threads=1,
            learning_rate=rate,
        ),
        seed=1,
        bucket_bytes=2048,
        folder=folder,
        times=replace(TIMES, join_timeout_s=240, request_timeout_s=120, silent_after_s=60),
    ) as (actor, (critic,)):
        yield actor, critic


async def train(groups: Groups, sequences: TokenSequences) -> list[TrainResult]:
    actor, critic = groups
    return list(
        await asyncio.gather(
            actor.train(actor_request(sequences, [5, 4])), critic.train(critic_request(sequences, [5, 4]))
        )
    )


async def outputs(groups: Groups, sequences: TokenSequences) -> list[Float32Array]:
    actor, critic = groups
    scored = await actor.forward(ActorForward(sequences=sequences, temperature=1.0))
    return [scored.logprobs, (await critic.forward(CriticForward(sequences=sequences))).values]


@pytest.mark.report("P53")
@pytest.mark.parametrize(
    ("backend", "stage"),
    [
        ("plain", 2),
        pytest.param("deepspeed", 3, marks=pytest.mark.long),
        pytest.param("deepspeed", 2, marks=pytest.mark.long),
        pytest.param("deepspeed", 1, marks=pytest.mark.long),
    ],
)
async def test_groups_restored_in_new_processes_train_on_as_those_that_were_saved(
    tiny_folder: Path,
    sequences: TokenSequences,
    tmp_path: Path,
    backend: TrainingBackend,
    stage: ZeroStage,
) -> None:
    saved = tmp_path / "saved"
    async with opened(tiny_folder, tmp_path / "first", backend, stage) as groups:
        states = [groups[0].state, groups[1].state]
        await check_folder_is_seen(tmp_path, states)
        await train(groups, sequences)
        await asyncio.gather(*(state.save(saved) for state in states))
        before = await outputs(groups, sequences)
        await train(groups, sequences)
        expected = await outputs(groups, sequences)
        (tmp_path / "file").write_text("no folder")
        with pytest.raises(CheckpointError, match="rank"):
            await states[0].save(tmp_path / "file")
        assert (await outputs(groups, sequences))[0] is not None, "the group goes on"
    assert {path.name for path in saved.iterdir()} == {"actor", "critic-0"}
    assert not (tmp_path / ".seen").exists()

    async with opened(tiny_folder, tmp_path / "second", backend, stage) as groups:
        for state in (groups[0].state, groups[1].state):
            await state.restore(saved)
        for one, other in zip(before, await outputs(groups, sequences), strict=True):
            np.testing.assert_array_equal(other, one)
        await train(groups, sequences)
        for one, other in zip(expected, await outputs(groups, sequences), strict=True):
            np.testing.assert_array_equal(other, one)
        with pytest.raises(CheckpointError):
            await groups[0].state.restore(tmp_path / "nowhere")


@pytest.mark.report("P54")
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("plain", 1), ("plain", 1)),
        (("deepspeed", 1), ("deepspeed", 1)),
        (("deepspeed", 2), ("deepspeed", 2)),
        (("deepspeed", 3), ("deepspeed", 3)),
        (("deepspeed", 3), ("plain", 1)),
        (("plain", 1), ("deepspeed", 3)),
    ],
)
async def test_groups_when_ranks_go_from_2_to_4_to_2_then_they_train_on_as_one_rank_would(
    tiny_folder: Path,
    sequences: TokenSequences,
    tmp_path: Path,
    first: tuple[TrainingBackend, ZeroStage],
    then: tuple[TrainingBackend, ZeroStage],
) -> None:
    """A save after each; the third one is as whole as the first: one rank alone goes on from it."""
    rate = 1e-3
    alone = (open_actor(tiny_folder, dtype="float32", rate=rate), open_critic(tiny_folder, dtype="float32"))
    before: list[Float32Array] = []
    turns = [(2, first), (4, then), (2, first), (2, ("plain", 1))]
    for turn, (num_ranks, (backend, stage)) in enumerate(turns):
        async with opened(
            tiny_folder,
            tmp_path / f"run-{turn}",
            backend,
            stage,
            num_ranks=num_ranks,
            rate=rate,
            warmup_steps=0,
        ) as groups:
            states = [groups[0].state, groups[1].state]
            if turn:
                for state in states:
                    await state.restore(tmp_path / f"save-{turn - 1}")
                for one, other in zip(before, await outputs(groups, sequences), strict=True):
                    np.testing.assert_allclose(other, one, atol=2e-6, rtol=0)
            results = await train(groups, sequences)
            before = await outputs(groups, sequences)
            await asyncio.gather(*(state.save(tmp_path / f"save-{turn}") for state in states))
        wanted = [
            alone[0].learner.train(actor_request(sequences, [5, 4])),
            alone[1].learner.train(critic_request(sequences, [5, 4])),
        ]
        for got, expected in zip(results, wanted, strict=True):
            assert_same_steps(got.steps, expected.steps)
