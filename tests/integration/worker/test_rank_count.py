"""Invariant 5 over ranks: processes in a gloo world see the gradient that one alone sees, to 1e-12."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asyppo_async.trainer.worker.processes import environment_of_rank
from asyppo_async.types import TokenSequences
from tests.integration.worker.rank_program import RANKS_OF_ADAPTERS, SIZES
from tests.unit.worker.learners import (
    actor_request,
    critic_request,
    largest_difference,
    open_actor,
    open_critic,
)

PROGRAM = [sys.executable, "-m", "tests.integration.worker.rank_program"]
ROOT = Path(__file__).parents[3]


def start(rank: int, num_ranks: int, port: int, folder: Path, output: Path) -> "subprocess.Popen[str]":
    arguments = [str(rank), str(num_ranks), str(port), str(folder), str(output)]
    environment = environment_of_rank(num_threads=1)
    return subprocess.Popen(
        [*PROGRAM, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("num_ranks", [2])
def test_gradients_of_all_steps_do_not_depend_on_the_number_of_ranks(
    tiny_folder: Path, sequences: TokenSequences, tmp_path: Path, num_ranks: int
) -> None:
    alone = []
    for lora in RANKS_OF_ADAPTERS:
        actor, critic = open_actor(tiny_folder, lora=lora), open_critic(tiny_folder, lora=lora)
        actor.learner.train(actor_request(sequences, SIZES))
        critic.learner.train(critic_request(sequences, SIZES))
        alone += [actor.backend.gradients, critic.backend.gradients]

    outputs = [tmp_path / f"{rank}.pt" for rank in range(num_ranks)]
    ranks = [start(0, num_ranks, 0, tiny_folder, outputs[0])]
    try:
        assert ranks[0].stdout is not None
        port = int(ranks[0].stdout.readline())
        ranks += [start(rank, num_ranks, port, tiny_folder, outputs[rank]) for rank in range(1, num_ranks)]
        for rank in ranks:
            rank.communicate(timeout=90)
            assert rank.returncode == 0
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    for output in outputs:
        for seen, expected in zip(
            torch.load(output, weights_only=True),
            alone,
            strict=True,
        ):
            assert len(seen) == len(expected) == 4
            differences = list(map(largest_difference, seen, expected))
            assert max(differences) < 1e-12, differences
