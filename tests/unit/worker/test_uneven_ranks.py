"""Three ranks with 0, 1, 2 and 3 micro-batches of a step, over real collectives: what one process comes to alone."""

from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from threading import Lock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store

from asyppo_async.algorithms.advantages import whiten
from asyppo_async.trainer.worker import sharding
from asyppo_async.trainer.worker.messages import ActorTrain, CriticTrain
from asyppo_async.trainer.worker.packing import Int64Array
from asyppo_async.trainer.worker.sharding import cut_actor_train, cut_critic_train
from asyppo_async.trainer.worker.world import World
from tests.unit.worker.learners import (
    actor_request,
    critic_request,
    largest_difference,
    open_actor,
    open_critic,
    random_sequences,
)
from tests.unit.worker.uneven import COUNTS, SIZES, with_garbage

SEQUENCES = random_sequences(3, 9)
LOADING = Lock()
"""transformers loads one model at a time."""
Gradients = list[dict[str, Tensor]]


@pytest.fixture
def dealt_unevenly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank i gets so many sequences of each mini-batch as `COUNTS` says; each is a micro-batch of its own."""
    counts = cycle(COUNTS)

    def deal(costs: Int64Array, num_ranks: int) -> Int64Array:
        return np.repeat(np.arange(num_ranks), next(counts))

    monkeypatch.setattr(sharding, "balance", deal)


def train(
    folder: Path, store: Store, rank: int, num_ranks: int, shard: ActorTrain | CriticTrain
) -> Gradients:
    world = World.join(store, rank=rank, size=num_ranks, host="127.0.0.1", deadline_s=30)
    if isinstance(shard, ActorTrain):
        with LOADING:
            actor = open_actor(folder, world=world, micro_batch_tokens=1)
        actor.learner.train(shard)
        return actor.backend.gradients
    with LOADING:
        critic = open_critic(folder, world=world, micro_batch_tokens=1)
    critic.learner.train(shard)
    return critic.backend.gradients


def train_together(folder: Path, shards: list[ActorTrain] | list[CriticTrain]) -> list[Gradients]:
    store, num_ranks = HashStore(), len(shards)
    with ThreadPoolExecutor(num_ranks) as ranks:
        futures = [
            ranks.submit(train, folder, store, rank, num_ranks, shard) for rank, shard in enumerate(shards)
        ]
        return [future.result(timeout=60) for future in futures]


@pytest.mark.report("P55")
@pytest.mark.usefixtures("dealt_unevenly")
def test_gradients_when_ranks_have_0_to_3_micro_batches_are_those_of_one_process(tiny_folder: Path) -> None:
    requests = with_garbage(actor_request(SEQUENCES, SIZES)), with_garbage(critic_request(SEQUENCES, SIZES))
    alone = open_actor(tiny_folder, packed=True), open_critic(tiny_folder, packed=True)
    alone[0].learner.train(requests[0])
    alone[1].learner.train(requests[1])
    together = [
        train_together(tiny_folder, cut_actor_train(requests[0], 3)),
        train_together(tiny_folder, cut_critic_train(requests[1], 3)),
    ]
    for learner, ranks in zip(alone, together, strict=True):
        for gradients in ranks:
            assert len(gradients) == len(COUNTS)
            differences = list(map(largest_difference, gradients, learner.backend.gradients))
            assert max(differences) < 1e-12, differences


@pytest.mark.report("P56")
@pytest.mark.usefixtures("dealt_unevenly")
def test_gradients_when_advantages_are_whitened_with_garbage_beside_them_are_those_of_one_process(
    tiny_folder: Path,
) -> None:
    """The statistics are of the whole batch, before it is dealt: a rank without sequences has no part in them."""
    request = actor_request(SEQUENCES, [3])
    valid = torch.from_numpy(request.policy_weights != 0)
    raw = torch.from_numpy(request.advantages)
    noisy = torch.where(valid, raw, torch.tensor(torch.nan))
    whitened = whiten(noisy, valid)
    expected = (raw[valid] - raw[valid].mean()) / raw[valid].std(correction=0)
    torch.testing.assert_close(whitened[valid], expected)
    request = with_garbage(actor_request(SEQUENCES, [3], advantages=whitened.numpy()))
    alone = open_actor(tiny_folder, packed=True)
    alone.learner.train(request)
    for gradients in train_together(tiny_folder, cut_actor_train(request, 3)):
        assert largest_difference(gradients[0], alone.backend.gradients[0]) < 1e-12
