"""Groups that share their devices in turn: the same bits as with devices of their own, and never two at once."""

import asyncio
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

from asyppo_async.config.critic import CriticSection
from asyppo_async.config.placement import PlacementSection
from asyppo_async.config.sections import ActorSection
from asyppo_async.trainer.worker.group import open_groups
from asyppo_async.trainer.worker.messages import ActorForward, CriticForward
from asyppo_async.types import TokenSequences
from tests.integration.worker.conftest import TIMES
from tests.integration.worker.test_groups import receive
from tests.unit.worker.learners import actor_request, critic_request, open_actor, open_critic


async def test_groups_when_colocated_compute_in_turn_and_come_to_the_bits_of_a_rank_of_its_own(
    tiny_folder: Path, sequences: TokenSequences, tmp_path: Path
) -> None:
    forward, values = ActorForward(sequences=sequences, temperature=1.0), CriticForward(sequences=sequences)
    train, fit = actor_request(sequences, [5, 4]), critic_request(sequences, [5, 4])
    async with open_groups(
        actor=ActorSection(model=tiny_folder, num_threads=1, learning_rate=1e-3),
        critic=CriticSection(model=tiny_folder, count=1, num_threads=1, learning_rate=1e-3, weight_decay=0.0),
        seed=1,
        bucket_bytes=2048,
        folder=tmp_path,
        times=TIMES,
        placement=PlacementSection(mode="colocated", moves="all"),
    ) as (actor, (critic,)):
        started_s = time.monotonic()
        computed_s = 0.0
        for _ in range(2):
            scored, fitted = await asyncio.gather(actor.forward(forward), critic.train(fit))
            trained, valued = await asyncio.gather(actor.train(train), critic.forward(values))
            computed_s += sum(result.compute_s for result in (scored, fitted, trained, valued))
        assert time.monotonic() - started_s >= computed_s
        turns = actor._ranks._turns
        assert turns is not None
        taken = list(turns.last)[-8:]
        assert sorted(turn.label for turn in taken) == ["actor"] * 4 + ["critic 0"] * 4
        assert all(one.end_s <= other.start_s for one, other in pairwise(taken))
        scored, valued = await asyncio.gather(actor.forward(forward), critic.forward(values))
        received = await receive(actor, epoch=3)  # while the critic is the last that had the device

    alone = open_actor(tiny_folder, dtype="float32", packed=True)
    critic_alone = open_critic(tiny_folder, dtype="float32", packed=True)
    for _ in range(2):
        critic_alone.learner.train(fit)
        alone.learner.train(train)
    np.testing.assert_array_equal(scored.logprobs, alone.learner.forward(forward).logprobs)
    np.testing.assert_array_equal(valued.values, critic_alone.learner.forward(values).values)
    weights = dict(alone.module.named_parameters())
    assert all(np.array_equal(tensor, weights[name].detach()) for name, tensor in received.items())
