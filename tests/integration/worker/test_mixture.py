"""Groups of a mixture of experts, whose checkpoint names each expert while the loaded model holds them fused."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from asyppo_async.config.critic import CriticSection
from asyppo_async.config.sections import ActorSection
from asyppo_async.trainer.worker.clients import ActorGroup, CriticGroup
from asyppo_async.trainer.worker.group import open_groups
from asyppo_async.trainer.worker.messages import ActorForward
from asyppo_async.trainer.worker.packing import lay_out
from asyppo_async.types import Int16Array, TokenSequences
from tests.integration.worker.conftest import TIMES
from tests.integration.worker.test_groups import Groups, assert_same_steps, receive
from tests.unit.worker.learners import (
    actor_request,
    critic_request,
    open_actor,
    open_critic,
    write_mixture,
)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def routed(sequences: TokenSequences) -> Int16Array:
    """Two of eight experts for every fed position, in both layers, as an engine would say."""
    num_inputs = int(lay_out(sequences).input_lengths.sum())
    order = np.random.default_rng(2).random((num_inputs, 2, 8)).argsort(-1)
    return order[..., :2].astype(np.int16)


@pytest.fixture(
    scope="module",
    params=["plain", *(pytest.param(f"zero {stage}", marks=pytest.mark.long) for stage in (1, 2, 3))],
)
async def groups(
    request: pytest.FixtureRequest, mixture: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[ActorGroup, tuple[CriticGroup, ...]]]:
    """An actor of two ranks and a critic of one, both mixtures."""
    name, _, stage = str(request.param).partition(" ")
    engine = {"backend": "plain" if name == "plain" else "deepspeed", "num_threads": 1}
    rate = {"learning_rate": 1e-3, "zero_stage": int(stage or 1), "zero_whole_below": 0}
    async with open_groups(
        actor=ActorSection(model=mixture, num_ranks=2, routing_replay=True, **engine, **rate),
        critic=CriticSection(model=mixture, count=1, **engine, **rate),
        seed=1,
        bucket_bytes=2048,
        folder=tmp_path_factory.mktemp("run"),
        times=replace(TIMES, join_timeout_s=120, request_timeout_s=60),
    ) as opened:
        yield opened


async def test_mixture_replays_trains_publishes_and_saves_over_two_ranks_what_one_rank_does(
    groups: Groups, mixture: Path, sequences: TokenSequences, routed: Int16Array, tmp_path: Path
) -> None:
    actor, _ = groups
    alone = open_actor(mixture, dtype="float32")
    forward = ActorForward(sequences=sequences, temperature=0.8, routed_experts=routed)
    scored = (await actor.forward(forward)).logprobs
    np.testing.assert_allclose(scored, alone.learner.forward(forward).logprobs, atol=2e-5)
    deaf = await actor.forward(replace(forward, routed_experts=None))
    assert np.abs(deaf.logprobs - scored).max() > 0.05

    train = actor_request(sequences, [5, 4, 9], routed_experts=routed)
    assert_same_steps((await actor.train(train)).steps, alone.learner.train(train).steps)
    await actor.save(tmp_path / "final")
    received = await receive(actor, epoch=3)

    saved = load_file(tmp_path / "final" / "model.safetensors")
    initial = load_file(mixture / "model.safetensors")
    alone.module.save_pretrained(tmp_path / "alone")
    expected = load_file(tmp_path / "alone" / "model.safetensors")
    assert received.keys() == saved.keys() == initial.keys() == expected.keys()
    assert "model.layers.1.mlp.experts.7.up_proj.weight" in received
    for name, tensor in received.items():
        assert torch.equal(tensor, saved[name]), name
        assert not torch.equal(tensor, initial[name]), name
        torch.testing.assert_close(tensor, expected[name], atol=2e-5, rtol=0)


async def test_critic_that_is_a_mixture_trains_as_in_this_process(
    groups: Groups, mixture: Path, sequences: TokenSequences
) -> None:
    _, (critic,) = groups
    train = critic_request(sequences, [5, 4])
    alone = open_critic(mixture, dtype="float32")
    assert_same_steps((await critic.train(train)).steps, alone.learner.train(train).steps)
