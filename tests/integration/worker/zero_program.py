"""One rank that trains through DeepSpeed, as a program: what it came to, per role and stage, is what rank 0 writes.

Arguments: rank, number of ranks, port of rank 0's store (0 at rank 0, which prints it), model folder, output folder,
dtype, and the journeys to make, as `actor:3`, with adapters as `actor:3:lora`, or as `actor:3:uneven` those of
`travel_unevenly`. With `actor:3:cpu` what can be is offloaded to host memory, with `actor:3:optimizer` and
`actor:3:all` the rank makes room for another group before each request.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import cast

import numpy as np
import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import Tensor, distributed, nn

from asyppo_async.config.learner import ZeroStage
from asyppo_async.config.placement import Moves
from asyppo_async.trainer.worker import sharding
from asyppo_async.trainer.worker.actor import Actor
from asyppo_async.trainer.worker.backend.choice import open_backend
from asyppo_async.trainer.worker.backend.plain import PlainBackend
from asyppo_async.trainer.worker.backend.protocol import Backend
from asyppo_async.trainer.worker.control import ComputeDtype, Offload, WorkerRole, WorkerSettings
from asyppo_async.trainer.worker.critic import CriticLearner
from asyppo_async.trainer.worker.critic_model import BACKBONE, Critic, load_critic
from asyppo_async.trainer.worker.documents import cutting_of
from asyppo_async.trainer.worker.learning_rate import LearningRate
from asyppo_async.trainer.worker.lora_layers import adapt
from asyppo_async.trainer.worker.messages import ActorForward, CriticForward, OptimizerStep
from asyppo_async.trainer.worker.model import Policy, Scoring, load_policy
from asyppo_async.trainer.worker.sharding import cut_actor_train, cut_critic_train
from asyppo_async.trainer.worker.steps import Stepper
from asyppo_async.trainer.worker.world import World
from asyppo_async.weights.store import open_store
from tests.unit.worker.learners import actor_request, critic_request, move_adapters, random_sequences
from tests.unit.worker.uneven import COUNTS, with_garbage
from tests.unit.worker.uneven import SIZES as UNEVEN_SIZES

SIZES = [5, 1, 0, 4, 9]
"""A mini-batch of one sequence leaves all ranks but one with nothing, one of none leaves all."""
FIRST_BUDGET = 20
"""Tokens of a micro-batch at rank 0; the others have more, so that ranks have different numbers of micro-batches."""
RATE = LearningRate(peak=1e-3, warmup_steps=3, final=1e-4, curve="linear", schedule_steps=12, head_peak=3e-3)
SEQUENCES = random_sequences(3, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Journey:
    """What a series of requests came to."""

    steps: tuple[OptimizerStep, ...]
    applied: bool
    """Of a step whose gradient was not finite though its loss was."""
    moments: dict[str, Tensor]
    """First moments after some steps: sums of gradients, so they differ by as much as gradients do."""
    weights: dict[str, Tensor]
    merged: dict[str, Tensor]
    """The weights as they leave the trainer: adapters added, by the names of the checkpoint."""
    outputs: Tensor
    """Log-probs or values at the end."""
    last_moments: dict[str, Tensor]
    averages: dict[str, Tensor]
    restored: dict[str, Tensor]
    """Weights after more training and the own saved state."""
    converted: dict[str, Tensor]
    """Weights after the state that the plain engine has saved, if there is one."""


class Traveller:
    """One rank without its process, of either role."""

    def __init__(self, settings: WorkerSettings, world: World, moves: Moves = "none") -> None:
        folder = Path(settings.model)
        self.settings = settings
        self.world = world
        self.moves = moves
        self.model: Policy | Critic = (
            load_policy(folder, settings.dtype)
            if settings.role == "actor"
            else load_critic(folder, settings.dtype, settings.seed)
        )
        if isinstance(self.model, Policy):
            self.adapters = adapt(self.model.module, settings)
        else:
            self.adapters = adapt(self.model.root, settings, prefix=BACKBONE)
        move_adapters(self.model.module)
        cutting = cutting_of(settings, self.model.root)
        self.backend: Backend = open_backend(self.model, settings, world, self.adapters)
        stepper = Stepper(self.backend, world, cutting=cutting, non_finite_budget=99)
        self.learner: Actor | CriticLearner = (
            Actor(self.model, stepper)
            if isinstance(self.model, Policy)
            else CriticLearner(self.model, stepper)
        )

    def train(
        self, sizes: Sequence[int], *, broken: bool = False, garbage: bool = False
    ) -> tuple[OptimizerStep, ...]:
        self.take_turns()
        nothing = np.full(SEQUENCES.num_response_tokens, np.nan, dtype=np.float32)
        rank, num_ranks = self.world.rank, self.world.size
        if isinstance(self.learner, Actor):
            request = actor_request(SEQUENCES, sizes, **({"advantages": nothing} if broken else {}))
            request = with_garbage(request) if garbage else request
            return self.learner.train(cut_actor_train(request, num_ranks)[rank]).steps
        targets = critic_request(SEQUENCES, sizes, **({"targets": nothing} if broken else {}))
        targets = with_garbage(targets) if garbage else targets
        return self.learner.train(cut_critic_train(targets, num_ranks)[rank]).steps

    def outputs(self) -> Tensor:
        """Of all sequences on every rank, whatever the number of micro-batches of the others."""
        self.take_turns()
        if isinstance(self.learner, Actor):
            return torch.from_numpy(
                self.learner.forward(ActorForward(sequences=SEQUENCES, temperature=1.0)).logprobs
            )
        return torch.from_numpy(self.learner.forward(CriticForward(sequences=SEQUENCES)).values)

    def take_turns(self) -> None:
        """Make room for another group, and come back."""
        if self.moves != "none":
            self.backend.to_host(weights=self.moves == "all")
            self.backend.to_device()

    def zero(self) -> Tensor:
        """A loss of exactly 0 that goes through all weights."""
        position = torch.zeros(1, dtype=torch.int64)
        if isinstance(self.model, Policy):
            scoring = Scoring(temperature=1.0, chunk_tokens=1)
            distribution = self.model.distribution(position[None], position, position, scoring)
            return (distribution.logprobs + distribution.entropies).sum() * 0
        return self.model.values(position[None], position).sum() * 0

    def weights(self) -> dict[str, Tensor]:
        weights = {}
        names = [name for name, _ in self.model.module.named_parameters()]
        for name, tensor in self.backend.full_tensors(names):
            weights[name] = tensor.clone()
            if self.world.rank == 0:
                time.sleep(0.01)  # the others run ahead to their next gather
        return weights

    def merged(self) -> dict[str, Tensor]:
        names = self.adapters.original_names(name for name, _ in self.model.module.named_parameters())
        tensors = self.adapters.merged(self.backend.full_tensors, names, here=self.world.rank == 0)
        return {name: tensor.clone() for name, tensor in tensors}

    def moments(self) -> dict[str, Tensor]:
        backend = self.backend
        if isinstance(backend, PlainBackend):
            state = backend._optimizer.state
            return {
                name: state[master]["exp_avg"].clone()
                for name, master in zip(backend._names, backend._masters, strict=True)
            }
        from asyppo_async.trainer.worker.backend.deepspeed import DeepSpeedBackend

        assert isinstance(backend, DeepSpeedBackend)
        found = {weight: state["exp_avg"] for weight, state in backend._whole_optimizer.state.items()}
        if self.settings.zero_stage == 3:
            from deepspeed.utils import safe_get_full_optimizer_state

            for weight in backend._weights.values():
                if weight.requires_grad and weight not in found:
                    found[weight] = safe_get_full_optimizer_state(weight, "exp_avg")
        else:
            found |= flat_moments(backend.engine.optimizer, self.world.size)
        return {
            name: found[weight].clone() for name, weight in backend._weights.items() if weight.requires_grad
        }


def flat_moments(optimizer: ZeROOptimizer, num_ranks: int) -> dict[nn.Parameter, Tensor]:
    """Of ZeRO 1 and 2, which lay the parameters of a group end to end and cut them into one piece for each rank."""
    bfloat16 = hasattr(optimizer, "bf16_groups")
    groups = optimizer.bf16_groups if bfloat16 else optimizer.bit16_groups
    pieces = optimizer.fp32_groups_flat_partition if bfloat16 else optimizer.single_partition_of_fp32_groups
    found = {}
    for weights, piece in zip(groups, pieces, strict=True):
        own = optimizer.optimizer.state[piece]["exp_avg"]
        everything = [torch.empty_like(own) for _ in range(num_ranks)]
        distributed.all_gather(everything, own)
        flat, start = torch.cat(everything), 0
        for weight in weights:
            found[weight] = flat[start : start + weight.numel()].view(weight.shape)
            start += weight.numel()
    return found


def travel(
    settings: WorkerSettings,
    world: World,
    state: Path,
    saved_to: Path | None = None,
    other: Path | None = None,
    moves: Moves = "none",
) -> Journey:
    """Train; meet a loss, then a gradient that is not finite; train; start the optimizer anew; train; score; save.

    Args:
        settings: of this rank.
        world: of all ranks.
        state: folder for the training state.
        saved_to: for the model.
        other: folder with the state of another engine.
        moves: what makes room for another group before each request.
    """
    rank = Traveller(settings, world, moves)
    steps = [*rank.train(SIZES), *rank.train([4, 5], broken=True)]
    rank.backend.backward(rank.zero().sqrt())
    outcome = rank.backend.step()
    steps += rank.train([2, 7])
    moments = rank.moments()
    rank.backend.forget_moments()
    steps += rank.train([9])
    weights, merged = rank.weights(), rank.merged()
    if saved_to is not None and settings.role == "actor":
        rank.backend.save(saved_to)
    outputs, last_moments = rank.outputs(), rank.moments()
    averages = {name: average.clone() for name, average in rank.backend.averages()}
    state.mkdir(exist_ok=True)
    rank.backend.save_state(state)
    rank.train([3, 6])  # the ranks meet, so that all have written
    rank.backend.load_state(state)
    restored, converted = rank.weights(), {}
    if other is not None:
        rank.backend.load_state(other)
        converted = rank.weights()
    return Journey(
        steps=tuple(steps),
        applied=outcome.applied,
        moments=moments,
        weights=weights,
        merged=merged,
        outputs=outputs,
        last_moments=last_moments,
        averages=averages,
        restored=restored,
        converted=converted,
    )


def travel_unevenly(settings: WorkerSettings, world: World) -> dict[str, Tensor]:
    """First moments after mini-batches of which each of three ranks has another number of micro-batches, 0 to 3."""
    rank = Traveller(replace(settings, micro_batch_tokens=1), world)
    rank.train(UNEVEN_SIZES, garbage=True)
    return rank.moments()


def settings_of(
    folder: Path,
    role: WorkerRole,
    stage: ZeroStage | None,
    dtype: ComputeDtype,
    budget: int,
    *,
    lora: bool = False,
) -> WorkerSettings:
    """Of a DeepSpeed rank, or without a stage of a plain one."""
    return WorkerSettings(
        role=role,
        model=str(folder),
        dtype=dtype,
        backend="plain" if stage is None else "deepspeed",
        zero_stage=stage or 1,
        # A critic's norms are whole on every rank, and cut for the optimizer only.
        zero_whole_below=0 if role == "actor" else 20,
        learning_rate=RATE,
        weight_decay=0.1,
        max_grad_norm=1.0,
        ema_decay=0.9,
        micro_batch_tokens=budget,
        # Another cutting alone moves bfloat16 gradients by 8 %.
        packing="packed" if stage in (1, 3) and dtype != "bfloat16" else "padded",
        recompute=stage == 3,
        lora_rank=2 if lora else 0,
        lora_alpha=6.0,
        num_threads=1,
        non_finite_budget=0,
        seed=1,
        bucket_bytes=2048,
        collective_deadline_s=60,
    )


def join_world(rank: int, num_ranks: int, port: int) -> World:
    """Rank 0 prints the port of its store."""
    torch.set_num_threads(1)
    store = None
    if rank == 0:
        store, port = open_store("127.0.0.1", num_ranks, 60)
        print(port, flush=True)
    return World.join(
        store or ("127.0.0.1", port), rank=rank, size=num_ranks, host="127.0.0.1", deadline_s=60
    )


def main(arguments: Sequence[str]) -> None:
    world = join_world(*map(int, arguments[:3]))
    rank = world.rank
    folder, output, dtype = Path(arguments[3]), Path(arguments[4]), cast(ComputeDtype, arguments[5])
    for journey in arguments[6:]:
        role, stage, *kind = journey.split(":")
        lora = kind == ["lora"]
        settings = settings_of(
            folder,
            cast(WorkerRole, role),
            cast(ZeroStage, int(stage)),
            dtype,
            FIRST_BUDGET + 10 * rank,
            lora=lora,
        )
        if kind == ["uneven"]:
            counts = cycle(COUNTS)
            sharding.balance = lambda costs, num_ranks, counts=counts: np.repeat(
                np.arange(num_ranks), next(counts)
            )
            moments = travel_unevenly(settings, world)
            if rank == 0:
                torch.save(moments, output / f"{journey}.pt")
            continue
        moves: Moves = "none"
        if kind == ["cpu"]:
            settings = replace(
                settings, offload=Offload(optimizer="cpu", weights="cpu" if stage == "3" else "none")
            )
        elif kind and not lora:
            moves = cast(Moves, kind[0])
        came_to = travel(
            settings,
            world,
            output / f"{journey}.state",
            saved_to=output / f"{journey}.model",
            other=output / f"{role}{':lora' if lora else ''}.state",
            moves=moves,
        )
        if rank == 0:
            torch.save(asdict(came_to), output / f"{journey}.pt")


if __name__ == "__main__":
    main(sys.argv[1:])
