"""What every preset asks of actor and critic, as requests; and, as a program, the gradients of one rank of DeepSpeed.

Arguments: rank, number of ranks, port of rank 0's store (0 at rank 0, which prints it), model folder, output folder.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from asyppo_async.config.learner import ZeroStage
from asyppo_async.config.load import preset_names
from asyppo_async.trainer.coordinator.arithmetic import actor_request, critic_requests, decide_tokens
from asyppo_async.trainer.coordinator.batch import batch_of
from asyppo_async.trainer.coordinator.estimators import Baselines
from asyppo_async.trainer.worker.actor import Actor
from asyppo_async.trainer.worker.control import ComputeDtype, WorkerRole
from asyppo_async.trainer.worker.critic import CriticLearner
from asyppo_async.trainer.worker.learning_rate import LearningRate
from asyppo_async.trainer.worker.messages import ActorTrain, CriticTrain, MiniBatches
from asyppo_async.trainer.worker.sharding import _shard, cut_actor_train, cut_critic_train
from asyppo_async.trainer.worker.world import World
from asyppo_async.types import Float32Array
from tests.integration.worker.zero_program import Traveller, join_world, settings_of
from tests.unit.composition.tiny import shrunk
from tests.unit.coordinator.worked_batch import make_group
from tests.unit.worker.learners import VOCABULARY
from tests.unit.worker.uneven import with_garbage

PRESETS = tuple(preset_names())
ROLES: tuple[WorkerRole, ...] = ("actor", "critic")
STAGES: tuple[ZeroStage, ...] = (1, 2, 3)
DTYPES: tuple[ComputeDtype, ...] = ("float32", "bfloat16")
OVERRIDES = [
    f"{section}.{name}={value}"
    for section in ("actor", "critic")
    for name, value in (("epochs", 1), ("mini_batches", 1))
]
"""One optimizer step, so that the first moments are those of one gradient."""
Request = TypeVar("Request", ActorTrain, CriticTrain)
Gradients = dict[str, Tensor]


def requests_of(preset: str) -> tuple[ActorTrain, CriticTrain | None]:
    """One step of a preset, on a dense model: as the coordinator makes it out of a made-up batch."""
    config = shrunk(preset, *OVERRIDES, "actor.routing_replay=false")
    random = np.random.default_rng(7)
    size = config.batch.group_size
    groups = []
    for draw in range(config.batch.prompts):
        lengths = random.integers(1, 7, size).tolist()
        behaviour = random.normal(-3, 0.5, sum(lengths)).tolist()
        rewards = [1.0 if (draw + index) % 2 else -1.0 for index in range(size)]
        groups.append(make_group(draw, lengths, rewards, logprobs=behaviour))
    batch = batch_of(0, groups, config)
    num_tokens = batch.sequences.num_response_tokens

    def noise(spread: float, *shape: int) -> Float32Array:
        return random.normal(0, spread, shape).astype(np.float32)

    values = noise(0.3, config.critic.count, num_tokens)
    proximal = batch.behaviour_logprobs + noise(0.1, num_tokens)
    reference = proximal + noise(0.1, num_tokens)
    trained = np.ones(num_tokens, dtype=np.bool_)
    decisions = decide_tokens(
        batch,
        values,
        proximal,
        stale=~trained,
        algorithm=config.algorithm,
        baselines=Baselines(
            values=values,
            end_values=noise(0.3, config.critic.count, len(batch.lengths)),
            priors=random.random(len(batch.lengths)),
            reference_logprobs=reference,
        ),
        entropies=np.abs(noise(1, num_tokens)),
    )
    actor = actor_request(
        batch,
        decisions,
        proximal,
        algorithm=config.algorithm,
        actor=config.actor,
        sampling=config.sampling,
        seed=0,
        reference_logprobs=reference,
    )
    critics = critic_requests(
        batch, values=values, trained=trained, algorithm=config.algorithm, critic=config.critic, seed=0
    )
    return with_random_tokens(actor), with_random_tokens(critics[0]) if critics else None


def with_random_tokens(request: Request) -> Request:
    """Tokens of the tiny model's vocabulary in the place of the made-up ones."""
    random, sequences = np.random.default_rng(8), request.sequences
    return replace(
        request,
        sequences=replace(
            sequences,
            prompt_token_ids=random.integers(0, VOCABULARY, len(sequences.prompt_token_ids)).astype(np.int32),
            response_token_ids=random.integers(0, VOCABULARY, sequences.num_response_tokens).astype(np.int32),
        ),
    )


def disturbed(request: Request) -> Request:
    """The same step in another order, with responses among it that have no weight and hold NaN."""
    num = request.sequences.num_sequences
    order = np.random.default_rng(9).permutation(np.concatenate([np.arange(num), np.array([0, 1, num - 1])]))
    first = np.zeros(len(order), dtype=np.bool_)
    first[np.unique(order, return_index=True)[1]] = True
    shard = _shard(request.sequences, order)
    real = np.repeat(first, shard.sequences.response_lengths)
    batches = MiniBatches(
        sequence_indices=np.arange(len(order), dtype=np.int32),
        sizes=np.array([len(order)], dtype=np.int32),
        denominators=request.mini_batches.denominators,
    )
    changes: dict[str, object] = {"sequences": shard.sequences, "mini_batches": batches}
    for name in PER_TOKEN:
        values = getattr(request, name, None)
        if values is not None:
            changes[name] = np.where(real, values[shard.tokens], np.zeros((), values.dtype))
    positives = getattr(request, "positives", None)
    if positives is not None:
        changes["positives"] = replace(positives, tokens=positives.tokens[shard.tokens] & real)
    return with_garbage(replace(request, **changes))  # type: ignore[arg-type]


PER_TOKEN = (
    *("proximal_logprobs", "advantages", "policy_weights", "entropy_weights", "counted", "masked"),
    *("reference_logprobs", "targets", "weights", "old_values"),
)


def gradients_of(
    folder: Path, role: WorkerRole, stage: ZeroStage | None, dtype: ComputeDtype, world: World
) -> dict[str, Gradients]:
    """Of every preset, by name: as the plain engine (no stage) computes it at once, or as ZeRO does, cut and disturbed.

    Weights do not move, so that one engine serves all; first moments are then a tenth of the gradient.
    """
    settings = settings_of(folder, role, stage, dtype, 4096 if stage is None else 12 + 6 * world.rank)
    settings = replace(
        settings,
        learning_rate=LearningRate(peak=0.0, warmup_steps=0),
        weight_decay=0.0,
        max_grad_norm=1e9,
        packing="padded" if stage in (None, 2) else "packed",
    )
    rank, found = Traveller(settings, world), {}
    for preset in PRESETS:
        actor, critic = requests_of(preset)
        if isinstance(rank.learner, Actor):
            actor = actor if stage is None else disturbed(actor)
            rank.learner.train(cut_actor_train(actor, world.size)[world.rank])
        elif critic is not None and isinstance(rank.learner, CriticLearner):
            critic = critic if stage is None else disturbed(critic)
            rank.learner.train(cut_critic_train(critic, world.size)[world.rank])
        else:
            continue
        found[preset] = rank.moments()
        rank.backend.forget_moments()
    return found


def main(arguments: Sequence[str]) -> None:
    world = join_world(*map(int, arguments[:3]))
    folder, output = Path(arguments[3]), Path(arguments[4])
    for role in ROLES:
        for stage in STAGES:
            for dtype in DTYPES:
                found = gradients_of(folder, role, stage, dtype, world)
                if world.rank == 0:
                    torch.save(found, output / f"{role}:{stage}:{dtype}.pt")


if __name__ == "__main__":
    main(sys.argv[1:])
