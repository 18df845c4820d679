"""How a training step grows: with tokens, with ranks, and with critics of a sixteenth to all of the actor's size.

    python -m benchmarks.learner_scaling [--width 256] [--layers 8] [--tokens 1024,2048,4096,8192] [--repeats 4]

Groups are processes as in a run, one thread a rank. Tokens and ranks: the actor's training request on frozen responses,
on one rank and on two, each on a core of its own; seconds are the ranks' own, the best of the repeats, and the line
through them is fitted by least squares. Critics: whole steps of AsyPPO, whose two critics train and score on the second
core, with critics of each size, beside those of GRPO on the same responses in the same minutes; memory is the sum over
ranks of the highest resident bytes above what the libraries hold. The last line is one JSON object:

    seconds_per_1000_tokens, fixed_s, r2       of the line through the step times of one rank
    speed_of_two_ranks                         one rank's time over that of two, at the most tokens
    critics                                    by share of the actor's size: step time and memory over GRPO's
"""

import argparse
import asyncio
import json
import os
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import psutil
import torch

from asyppo_async.config.critic import CriticSection
from asyppo_async.config.sections import ActorSection
from asyppo_async.trainer.worker.group import open_groups
from benchmarks.critic_cost import (
    CORES,
    TIMES,
    VOCABULARY,
    Arm,
    Seat,
    name_of,
    open_set,
    rollouts,
    with_logprobs,
    write_models,
)
from benchmarks.critic_cost_meter import Measured, best_s, line_of, memory_bytes
from benchmarks.learner_contenders import Plan, train_request

RESPONSE_TOKENS = 128
MICRO_BATCH_TOKENS = 2048
GRPO = Arm(name="GRPO", groups="grpo", schedule="pre")
ASYPPO = Arm(name="AsyPPO", groups="asyppo", schedule="post")
SHARES = {"1/16": (2, 4), "1/8": (2, 2), "1/4": (2, 1), "1/2": (1, 2), "1": (1, 1)}
"""By what width and depth of the actor are divided."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=256, help="of the actor; a multiple of 64")
    parser.add_argument("--layers", type=int, default=8, help="of the actor; a multiple of 4")
    parser.add_argument("--tokens", default="1024,2048,4096,8192", help="response tokens of a step")
    parser.add_argument("--repeats", type=int, default=4, help="counted steps of each point")
    parser.add_argument("--responses", type=int, default=32, help="of a step with critics; a multiple of 8")
    parser.add_argument("--longest", type=int, default=192, help="tokens of a response with critics")
    arguments = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two cores are needed")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measure(arguments, Path(folder)))))


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    models = write_models(folder / "models", arguments.width, arguments.layers)
    tokens = [int(word) for word in arguments.tokens.split(",")]
    one = await step_times(models, folder, 1, tokens, arguments.repeats)
    two = await step_times(models, folder, 2, tokens, arguments.repeats)
    slope, fixed, r2 = line_through(tokens, one)
    return {
        "tokens": tokens,
        "one_rank_s": [round(seconds, 3) for seconds in one],
        "two_ranks_s": [round(seconds, 3) for seconds in two],
        "seconds_per_1000_tokens": round(slope * 1000, 4),
        "fixed_s": round(fixed, 4),
        "r2": round(r2, 5),
        "speed_of_two_ranks": round(one[-1] / two[-1], 3),
        "critics": await critics_over_grpo(arguments, models, folder),
    }


async def step_times(
    models: Path, folder: Path, num_ranks: int, tokens: list[int], repeats: int
) -> list[float]:
    """Seconds of a training request of each size; the first one of all warms up."""
    section = ActorSection(
        model=models / "actor",
        num_ranks=num_ranks,
        num_threads=1,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        learning_rate=1e-6,
    )
    before = set(psutil.Process().children())
    async with open_groups(
        actor=section,
        critic=CriticSection(count=0),
        seed=0,
        bucket_bytes=2**20,
        folder=folder / f"ranks-{num_ranks}",
        times=TIMES,
    ) as (actor, _):
        ranks = sorted(set(psutil.Process().children()) - before, key=name_of)
        for rank, core in zip(ranks, CORES, strict=False):
            rank.cpu_affinity([core])
        requests = [
            train_request(
                Plan(model="", lengths=(RESPONSE_TOKENS,) * (number // RESPONSE_TOKENS)), VOCABULARY
            )
            for number in tokens
        ]
        await actor.train(requests[0])
        best = [float("inf")] * len(tokens)
        for _ in range(repeats):
            for index, request in enumerate(requests):
                best[index] = min(best[index], (await actor.train(request)).compute_s)
    for number, seconds in zip(tokens, best, strict=True):
        print(f"{num_ranks} rank(s), {number:6} tokens: {seconds:.3f} s", flush=True)
    return best


def line_through(tokens: list[int], seconds: list[float]) -> tuple[float, float, float]:
    """Slope, height at no tokens, share of the variance that the line explains."""
    slope, fixed = np.polyfit(tokens, seconds, 1)
    left = np.array(seconds) - (slope * np.array(tokens) + fixed)
    return float(slope), float(fixed), float(1 - left.var() / np.var(seconds))


async def critics_over_grpo(
    arguments: argparse.Namespace, models: Path, folder: Path
) -> dict[str, dict[str, float]]:
    """One size after the other, GRPO's step before each of AsyPPO's."""
    frozen = rollouts(arguments.responses, arguments.longest)
    found = {}
    async with AsyncExitStack() as opened:
        sets = {
            name: await opened.enter_async_context(open_set(name, models, folder / name))
            for name in ("library", "grpo")
        }
        frozen = await with_logprobs(frozen, sets["grpo"].actor)
        library = Seat(GRPO, sets["library"], frozen)
        await library.step()
        per_rank = (await library.step()).peak_bytes
        peer = Seat(GRPO, sets["grpo"], frozen)
        await peer.step()
        for index, (share, (thinner, shallower)) in enumerate(SHARES.items()):
            shape = (arguments.width // thinner, arguments.layers // shallower)
            own = write_models(folder / f"models-{index}", arguments.width, arguments.layers, shape)
            async with open_set("asyppo", own, folder / f"asyppo-{index}") as groups:
                seat = Seat(ASYPPO, groups, frozen)
                await seat.step()
                pairs = [(await peer.step(), await seat.step()) for _ in range(arguments.repeats)]
            found[share] = over(pairs, per_rank)
            print(line_of(f"critics of {share}", [pair[1] for pair in pairs], per_rank), flush=True)
        print(line_of("GRPO", [pair[0] for pair in pairs], per_rank), flush=True)
    return found


def over(pairs: list[tuple[Measured, Measured]], library_bytes: int) -> dict[str, float]:
    peer, own = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return {
        "step_time_over_grpo": round(best_s(own) / best_s(peer), 3),
        "memory_over_grpo": round(memory_bytes(own, library_bytes) / memory_bytes(peer, library_bytes), 3),
    }


if __name__ == "__main__":
    main()
