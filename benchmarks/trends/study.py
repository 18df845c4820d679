"""Tiny-model studies: several arms, equal steps and tokens, several seeds, mean, spread and a paired test over seeds.

    python -m benchmarks.trends.study ladder      single critic, shared ensemble, group split, + mask, + filter; UTD 4
    python -m benchmarks.trends.study staleness   coupled against decoupled PPO at lag 0, 4 and 16
    python -m benchmarks.trends.study lambda      the actor's lambda with Monte Carlo critics
      [--seeds 5] [--steps 60] [--only ARM ...]

An arm's figure is its mean reward over the last fifth of the steps. The test is a paired t over seeds against the first
arm; with five seeds |t| > 2.78 is a difference at 5 %. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import math
import statistics
import time
from dataclasses import dataclass

import torch

from asyppo_async.config.load import config_from_tree
from asyppo_async.config.sections import TrainConfig
from benchmarks.trends.task import MAX_TOKENS, open_study_run

SIZES = (
    "batch.prompts=8",
    "batch.group_size=8",
    "actor.model=a",
    "critic.model=c",
    "actor.learning_rate=2e-3",
    "actor.warmup_steps=0",
    "actor.mini_batches=2",
    "critic.learning_rate=4e-3",
    "critic.warmup_steps=0",
    "critic.mini_batches=2",
    f"sampling.max_tokens={MAX_TOKENS}",
)
ACTOR_SIZE, MINI_CRITIC_SIZE = 32, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One method of a study."""

    name: str
    preset: str
    overrides: tuple[str, ...] = ()
    lag: int = 0
    critic_size: int = MINI_CRITIC_SIZE

    def config(self, seed: int) -> TrainConfig:
        bound = f"staleness.max_staleness={self.lag}"
        return config_from_tree({"preset": self.preset}, [*SIZES, bound, f"run.seed={seed}", *self.overrides])


NO_MASKS = ("algorithm.advantage_mask_share=0", "algorithm.entropy_filter_share=0")
NO_FILTER = ("algorithm.entropy_filter_share=0",)
UTD = ("actor.epochs=4",)
NO_ENTROPY = ("algorithm.entropy_coefficient=0",)
COUPLED = ("algorithm.loss_reference=behaviour", "algorithm.mismatch=none")

STUDIES = {
    "ladder": (
        Arm(name="one small critic", preset="ppo_asymmetric", overrides=UTD),
        Arm(
            name="shared ensemble", preset="asyppo", overrides=(*NO_MASKS, *NO_ENTROPY, "critic.data=shared")
        ),
        Arm(name="group split", preset="asyppo", overrides=(*NO_MASKS, *NO_ENTROPY)),
        Arm(name="+ advantage mask", preset="asyppo", overrides=(*NO_FILTER, *NO_ENTROPY)),
        Arm(
            name="+ random mask",
            preset="asyppo",
            overrides=(*NO_FILTER, *NO_ENTROPY, "algorithm.advantage_mask_by=random"),
        ),
        Arm(name="+ entropy filter", preset="asyppo"),
        Arm(name="GRPO", preset="grpo", overrides=UTD),
        Arm(name="symmetric PPO", preset="ppo", overrides=UTD, critic_size=ACTOR_SIZE),
    ),
    "staleness": tuple(
        Arm(name=f"{name}, lag {lag}", preset=preset, overrides=overrides, lag=lag)
        for lag in (0, 4, 16)
        for name, preset, overrides in (("decoupled", "areal", ()), ("coupled", "areal", COUPLED))
    ),
    "lambda": tuple(
        Arm(name=f"lambda {value}", preset="vcppo", overrides=(f"algorithm.lambda_actor={value}",))
        for value in ("1.0", "0.99", "0.95", "0.8", "adaptive")
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", nargs="*", help="names of arms")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arms = [arm for arm in STUDIES[arguments.study] if not arguments.only or arm.name in arguments.only]
    scores: dict[str, list[float]] = {}
    for arm in arms:
        started_s = time.monotonic()
        scores[arm.name] = [
            asyncio.run(score_of(arm, seed=seed, steps=arguments.steps)) for seed in range(arguments.seeds)
        ]
        print(line_of(arm.name, scores, arms[0].name, time.monotonic() - started_s), flush=True)
    print(json.dumps({"study": arguments.study, "steps": arguments.steps, "scores": scores}))


async def score_of(arm: Arm, *, seed: int, steps: int) -> float:
    """Mean reward over the last fifth of a run."""
    run = open_study_run(
        arm.config(seed), seed=seed, lag=arm.lag, actor_size=ACTOR_SIZE, critic_size=arm.critic_size
    )
    rewards = [(await run.train())[1]["reward/mean"] for _ in range(steps)]
    return statistics.fmean(rewards[-max(1, steps // 5) :])


def line_of(name: str, scores: dict[str, list[float]], first: str, seconds: float) -> str:
    own = scores[name]
    spread = statistics.stdev(own) if len(own) > 1 else math.nan
    return (
        f"{name:20s} {statistics.fmean(own):+.3f} +- {spread:.3f}   t {paired_t(own, scores[first]):+6.2f}   "
        f"{seconds / len(own):5.1f} s a run"
    )


def paired_t(one: list[float], other: list[float]) -> float:
    """Of the differences seed by seed; 0 for an arm against itself."""
    differences = [left - right for left, right in zip(one, other, strict=True)]
    if len(differences) < 2 or statistics.stdev(differences) == 0:
        return 0.0
    return statistics.fmean(differences) / (statistics.stdev(differences) / math.sqrt(len(differences)))


if __name__ == "__main__":
    main()
