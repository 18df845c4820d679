"""What critics cost: step time and peak memory of AsyPPO, symmetric PPO and GRPO on one batch, in one sitting.

    python -m benchmarks.critic_cost [--width 384] [--layers 8] [--repeats 8] [--responses 32] [--longest 256]

AsyPPO has two critics of an eighth of the actor's parameters, symmetric PPO one of the actor's size. Groups are
processes as in a run, the steps are the run's own; rollouts are frozen and there is no engine. The actor has core 0,
the critics core 1, one thread each; in the rows `one core` all of them share core 0. All arms are open at once and take
turns, step by step, so that whatever else the machine does meets all of them; of each arm the best step counts, the
first one not. Every arm trains on the same responses, one epoch in two mini-batches. CPU seconds are those of the
ranks; memory is the sum over ranks of the highest resident bytes, less what a rank with next to no model holds. A line
per arm says what its step is made of: seconds of each phase, some beside each other, `rest` outside of all. The last
line is one JSON object:

    asyppo_over_grpo         step time of AsyPPO's best schedule over GRPO's
    asyppo_over_symmetric    likewise over symmetric PPO in its own schedule, values before both train at once ...
    asyppo_over_symmetric_post       ... and where its critic trains first, as AsyPPO's do
    asyppo_over_symmetric_one_core   all on one core
    memory_over_symmetric, memory_over_grpo
"""

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyppo_async.config.load import config_from_tree
from asyppo_async.config.sections import TrainConfig
from asyppo_async.trainer.coordinator.batch import Batch, batch_of
from asyppo_async.trainer.coordinator.step import StepRunner
from asyppo_async.trainer.worker.clients import ActorGroup, CriticGroup
from asyppo_async.trainer.worker.group import open_groups
from asyppo_async.trainer.worker.messages import ActorForward
from asyppo_async.trainer.worker.specs import GroupTimes
from asyppo_async.types import Group, Prompt, Response, Trajectory, VersionRuns, concatenate_sequences
from benchmarks.critic_cost_meter import Measured, Meter, line_of, ratios

VOCABULARY = 256
PROMPT_TOKENS = 16
GROUP_SIZE = 8
HEAD_DIM = 32
TIMES = GroupTimes(join_timeout_s=300, request_timeout_s=900, silent_after_s=300)
COMMON = (
    "actor.epochs=1",
    "actor.mini_batches=2",
    "actor.num_threads=1",
    "actor.micro_batch_tokens=2048",
    "critic.epochs=1",
    "critic.mini_batches=2",
    "critic.num_threads=1",
    "critic.micro_batch_tokens=2048",
    f"batch.group_size={GROUP_SIZE}",
    "staleness.max_staleness=1000000",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One method with one schedule on one division of the cores."""

    name: str
    groups: str
    """The set of processes that it runs on; arms may share one."""
    schedule: str
    one_core: bool = False


ARMS = (
    Arm(name="GRPO", groups="grpo", schedule="pre"),
    Arm(name="AsyPPO post", groups="asyppo", schedule="post"),
    Arm(name="AsyPPO critic_ahead", groups="asyppo", schedule="critic_ahead"),
    Arm(name="AsyPPO pre", groups="asyppo", schedule="pre"),
    Arm(name="symmetric PPO pre", groups="ppo", schedule="pre"),
    Arm(name="symmetric PPO post", groups="ppo", schedule="post"),
    Arm(name="AsyPPO post, one core", groups="asyppo", schedule="post", one_core=True),
    Arm(name="symmetric PPO pre, one core", groups="ppo", schedule="pre", one_core=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=384, help="of the actor; a multiple of 64")
    parser.add_argument("--layers", type=int, default=8, help="of the actor; even")
    parser.add_argument("--responses", type=int, default=32, help="a multiple of 8")
    parser.add_argument("--longest", type=int, default=256, help="tokens of a response")
    parser.add_argument("--repeats", type=int, default=8, help="counted steps of each arm")
    arguments = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two cores are needed, one for the actor and one for the critics")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(compare(arguments, Path(folder)))))


async def compare(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """All arms in turn; prints a line for each."""
    models = write_models(folder, arguments.width, arguments.layers)
    frozen = rollouts(arguments.responses, arguments.longest)
    async with AsyncExitStack() as opened:
        sets = {}
        for name in ("library", "grpo", "asyppo", "ppo"):
            sets[name] = await opened.enter_async_context(open_set(name, models, folder / name))
        frozen = await with_logprobs(frozen, sets["grpo"].actor)
        library = Seat(ARMS[0], sets["library"], frozen)
        await library.step()
        per_rank = (await library.step()).peak_bytes
        seats = [Seat(arm, sets[arm.groups], frozen) for arm in ARMS]
        for seat in seats:
            await seat.step()
        measured: dict[str, list[Measured]] = {arm.name: [] for arm in ARMS}
        for _ in range(arguments.repeats):
            for seat in seats:
                measured[seat.arm.name].append(await seat.step())
    for name, steps in measured.items():
        print(line_of(name, steps, per_rank), flush=True)
    return ratios(measured, per_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSet:
    """The processes of one method."""

    preset: str
    overrides: tuple[str, ...]
    actor: ActorGroup
    critics: tuple[CriticGroup, ...]
    ranks: dict[str, psutil.Process]
    """By name."""

    def config(self, schedule: str) -> TrainConfig:
        overrides = [*COMMON, *self.overrides, f"algorithm.schedule={schedule}"]
        return config_from_tree({"preset": self.preset}, overrides)


class Seat:
    """An arm in the middle of its run."""

    def __init__(self, arm: Arm, groups: GroupSet, frozen: list[Group]) -> None:
        self.arm = arm
        self._groups = groups
        self._frozen = frozen
        self._config = groups.config(arm.schedule)
        self._runner = StepRunner(self._config, groups.actor, groups.critics)
        self._num_steps = 0

    async def step(self) -> Measured:
        """One step on the frozen rollouts."""
        first, second = CORES
        for name, rank in self._groups.ranks.items():
            rank.cpu_affinity([first if self.arm.one_core or name.startswith("actor") else second])
        with Meter(self._groups.ranks) as meter:
            result = await self._runner.run(self._batch(0), meter.trace, self._ahead)
        assert result.actor is not None, "a step without a gradient costs nothing"
        self._num_steps += 1
        return meter.measured

    def _batch(self, ahead: int) -> Batch:
        return batch_of(self._num_steps + ahead, self._frozen, self._config)

    async def _ahead(self) -> Batch:
        return self._batch(1)


CORES = tuple(sorted(os.sched_getaffinity(0))[:2])


@asynccontextmanager
async def open_set(name: str, models: Path, folder: Path) -> AsyncIterator[GroupSet]:
    """Start the ranks of a method."""
    preset = "grpo" if name == "library" else name
    actor = "next-to-nothing" if name == "library" else "actor"
    critic = {"asyppo": "critic", "ppo": "actor"}.get(name)
    overrides = [f"actor.model={models / actor}"]
    overrides += [] if critic is None else [f"critic.model={models / critic}"]
    config = config_from_tree({"preset": preset}, [*COMMON, *overrides])
    before = set(psutil.Process().children())
    async with open_groups(
        actor=config.actor, critic=config.critic, seed=0, bucket_bytes=2**20, folder=folder, times=TIMES
    ) as (actor_group, critics):
        ranks = {name_of(child): child for child in psutil.Process().children() if child not in before}
        yield GroupSet(
            preset=preset, overrides=tuple(overrides), actor=actor_group, critics=critics, ranks=ranks
        )


def name_of(rank: psutil.Process) -> str:
    words = rank.cmdline()
    return words[words.index("--name") + 1]


def write_models(folder: Path, width: int, layers: int, critic: tuple[int, int] | None = None) -> Path:
    """`actor`; `critic` of this width and depth, or half as wide and half as deep; `next-to-nothing`."""
    torch.manual_seed(0)
    for name, (hidden, depth) in {
        "actor": (width, layers),
        "critic": critic or (width // 2, layers // 2),
        "next-to-nothing": (HEAD_DIM, 1),
    }.items():
        config = Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=depth,
            num_attention_heads=hidden // HEAD_DIM,
            num_key_value_heads=hidden // HEAD_DIM,
            head_dim=HEAD_DIM,
            tie_word_embeddings=True,
        )
        model = Qwen3ForCausalLM(config)
        print(f"{name}: {sum(weight.numel() for weight in model.parameters()) / 1e6:.2f} M parameters")
        model.save_pretrained(folder / name)
    return folder


def rollouts(num_responses: int, longest: int) -> list[Group]:
    """Groups of random tokens, half of each right; long-tailed lengths about an eighth of the longest."""
    random = np.random.default_rng(0)
    lengths = np.exp(random.normal(np.log(longest / 8), 1.0, num_responses)).clip(2, longest).astype(int)
    groups = []
    for draw in range(num_responses // GROUP_SIZE):
        ids = tuple(random.integers(0, VOCABULARY, PROMPT_TOKENS).tolist())
        prompt = Prompt(id=f"p{draw}", task="frozen", text="", token_ids=ids, answer="")
        members = []
        for index, length in enumerate(lengths[draw * GROUP_SIZE :][:GROUP_SIZE]):
            response = Response(
                token_ids=random.integers(0, VOCABULARY, length).astype(np.int32),
                behaviour_logprobs=np.zeros(length, dtype=np.float32),
                versions=VersionRuns(((0, length),)),
                finish_reason="stop",
            )
            members.append(
                Trajectory(
                    prompt=prompt, draw_id=draw, sample_index=index, response=response,
                    reward=1.0 if index % 2 else -1.0, server="frozen", started_s=0.0, finished_s=0.0,
                )
            )  # fmt: skip
        groups.append(
            Group(
                draw_id=draw, prompt=prompt, admission_version=0, trajectories=tuple(members), finished_s=0.0
            )
        )
    return groups


async def with_logprobs(groups: list[Group], actor: ActorGroup) -> list[Group]:
    """The same groups as if the actor had sampled them."""
    members = [member for group in groups for member in group.trajectories]
    sequences = concatenate_sequences(
        [(member.prompt.token_ids, member.response.token_ids) for member in members]
    )
    logprobs = (await actor.forward(ActorForward(sequences=sequences, temperature=1.0))).logprobs
    parts = iter(np.split(logprobs, np.cumsum(sequences.response_lengths)[:-1]))

    def sampled(member: Trajectory) -> Trajectory:
        return replace(member, response=replace(member.response, behaviour_logprobs=next(parts)))

    return [replace(group, trajectories=tuple(map(sampled, group.trajectories))) for group in groups]


if __name__ == "__main__":
    main()
