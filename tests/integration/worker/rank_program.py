"""One rank of a float64 world, as a program: trains on its shard and writes the gradients that it saw.

Arguments: rank, number of ranks, port of rank 0's store (0 at rank 0, which prints it), model folder, output.
"""

import sys
from pathlib import Path

import torch

from asyppo_async.trainer.worker.sharding import cut_actor_train, cut_critic_train
from asyppo_async.trainer.worker.world import World
from asyppo_async.weights.store import open_store
from tests.unit.worker.learners import (
    actor_request,
    critic_request,
    open_actor,
    open_critic,
    random_sequences,
)

SIZES = [5, 1, 0, 4, 9]
"""A mini-batch of one sequence leaves all ranks but one with nothing."""
RANKS_OF_ADAPTERS = (0, 2)
"""0: the weights train."""


def main(rank: int, num_ranks: int, port: int, folder: Path, output: Path) -> None:
    store = None
    if rank == 0:
        store, port = open_store("127.0.0.1", num_ranks, 60)
        print(port, flush=True)
    world = World.join(
        store or ("127.0.0.1", port), rank=rank, size=num_ranks, host="127.0.0.1", deadline_s=60
    )
    sequences = random_sequences(3, 9)
    # Ranks cut their shards into micro-batches of different sizes on purpose.
    budget = 20 + 10 * rank
    gradients = []
    for lora in RANKS_OF_ADAPTERS:
        actor = open_actor(folder, world=world, micro_batch_tokens=budget, lora=lora)
        critic = open_critic(folder, world=world, micro_batch_tokens=budget, lora=lora)
        actor.learner.train(cut_actor_train(actor_request(sequences, SIZES), num_ranks)[rank])
        critic.learner.train(cut_critic_train(critic_request(sequences, SIZES), num_ranks)[rank])
        gradients += [actor.backend.gradients, critic.backend.gradients]
    torch.save(gradients, output)


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        int(sys.argv[3]),
        Path(sys.argv[4]),
        Path(sys.argv[5]),
    )
