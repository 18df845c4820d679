"""Tiny-model studies: several arms, equal steps and tokens, several seeds; docs/evidence.md has what came out.

    python -m benchmarks.trends.study ladder      single critic, shared ensemble, group split, + mask, + filter; UTD 4
    python -m benchmarks.trends.study staleness   coupled against decoupled PPO at lag 0, 4, 16; an engine in bfloat16
    python -m benchmarks.trends.study pretraining    VC-PPO: decoupled lambda and value pretraining, long answers
    python -m benchmarks.trends.study daps        DAPS against uniform draws on prompts of mixed difficulty
    python -m benchmarks.trends.study single      S3AC, REINFORCE++, FlashREINFORCE with one response a prompt
    python -m benchmarks.trends.study orthogonal  a critic's opinion of prompts and of tokens, apart; three losses
    python -m benchmarks.trends.study coverage    a coverage pool against the initial policy's; value head and clip
    python -m benchmarks.trends.study best_of     the critic as process reward against a majority vote
    python -m benchmarks.trends.study lambda      the actor's lambda; value std against the size of a token's gradient
      [--seeds 10] [--only ARM ...]

Each run is stored when it ends, and a study that was stopped goes on where it was. Tables and plots are made from what
is stored: `python -m benchmarks.trends.evidence`.
"""

import argparse
import asyncio
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

from asyppo_async.algorithms.calibration import mean_by_position
from asyppo_async.trainer.coordinator.step import StepResult
from benchmarks.trends.arm_run import open_arm
from benchmarks.trends.arms import Arm
from benchmarks.trends.best_of_n import best_of_n
from benchmarks.trends.comparison import compare
from benchmarks.trends.critic_tasks import PARITY
from benchmarks.trends.engine_gradients import gradient_errors
from benchmarks.trends.pretrained import coverage_and_heads
from benchmarks.trends.reference import reference_success
from benchmarks.trends.results import Measurement, Results, Run
from benchmarks.trends.std_and_gradients import std_against_gradients
from benchmarks.trends.studies import STUDIES

EARLY_STEPS = 10
"""Over which advantages by position are averaged: before critics and policy have found each other."""
FIGURES = (
    "actor/entropy",
    "actor/clip_fraction_low",
    "actor/clip_fraction_high",
    "actor/kl_proximal",
    "mismatch/kl_k3",
    "mismatch/ratio_max",
    "mismatch/ratio_min",
    "tokens/rejected",
    "mismatch/rejected_responses",
    "value_std/p50",
    "critic_0/explained_variance_used",
    "reward/groups_all_equal",
    "selection/accepted_middle_share",
    "selection/candidates_per_accepted",
)
Rows = list[dict[str, float | str]]
MEASUREMENTS: dict[str, tuple[str, Callable[[int], Rows]]] = {
    "staleness": ("gradient error", gradient_errors),
    "lambda": ("value std and gradient", std_against_gradients),
    "coverage": ("pool and head", coverage_and_heads),
    "best_of": ("best of n", best_of_n),
    "daps": ("reference success", reference_success),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--only", nargs="*", help="names of arms")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    study, results, commit = STUDIES[arguments.study], Results(arguments.study), commit_of_code()
    # Seed by seed: a study that is stopped early has all arms at equal seeds.
    for seed in range(arguments.seeds):
        for arm in study.arms:
            if arguments.only and arm.name not in arguments.only:
                continue
            if results.run(arm.name, seed, spec=arm.spec, num_steps=study.num_steps) is None:
                results.add(asyncio.run(one_run(arm, seed=seed, num_steps=study.num_steps, commit=commit)))
        if arguments.study in MEASUREMENTS and not arguments.only:
            name, measure = MEASUREMENTS[arguments.study]
            if seed not in [done.seed for done in results.measured(name)]:
                started_s = time.process_time()
                rows = measure(seed)
                cpu_s = round(time.process_time() - started_s, 1)
                results.add(Measurement(name=name, seed=seed, commit=commit, cpu_s=cpu_s, rows=rows))
        print(f"seed {seed} is done", flush=True)
    for arm in study.arms:
        if not arguments.only or arm.name in arguments.only:
            print(line_of(arm, results))


async def one_run(arm: Arm, *, seed: int, num_steps: int, commit: str) -> Run:
    """All steps of one arm with one seed."""
    started_s = time.process_time()
    run = await open_arm(arm, seed)
    series: dict[str, list[float]] = defaultdict(list)
    rewards, lengths, num_tokens = [], [], 0.0
    for step in range(num_steps):
        result, metrics = await run.train()
        if step < EARLY_STEPS:
            for tenth, value in enumerate(advantage_by_tenth(result)):
                series[f"early/advantage_tenth_{tenth}"].append(value)
        if arm.task is not PARITY:
            lengths.append(round(metrics["response/length_mean_tokens"], 2))
        rewards.append(round(metrics["reward/mean"], 4))
        num_tokens += metrics["batch/tokens"]
        for name in FIGURES:
            if name in metrics:
                series[name].append(metrics[name])
    return Run(
        arm=arm.name,
        seed=seed,
        num_steps=num_steps,
        spec=arm.spec,
        commit=commit,
        cpu_s=round(time.process_time() - started_s, 1),
        num_tokens=int(num_tokens),
        rewards=rewards,
        lengths=lengths,
        figures={name: round(statistics.fmean(values), 6) for name, values in series.items()},
    )


def advantage_by_tenth(result: StepResult) -> tuple[float, ...]:
    """Mean advantage, with its sign, in each tenth of a response."""
    lengths = torch.from_numpy(result.batch.lengths)
    return mean_by_position(result.decisions.advantages, lengths, num_parts=10)


def line_of(arm: Arm, results: Results) -> str:
    """Mean reward over all steps and over the last fifth, and the latter's comparison."""
    own, other = results.of_arm(arm.name), results.of_arm(arm.against)
    whole = statistics.fmean(statistics.fmean(run.rewards) for run in own)
    ends = [late(run) for run in own]
    test = compare(ends, [late(run) for run in other]) if len(own) == len(other) else None
    verdict = (
        "" if test is None else f"   {test.difference:+.3f} t {test.t:+.2f} p {test.p:.3f} to {arm.against}"
    )
    return f"{arm.name:24s} {whole:+.3f} {statistics.fmean(ends):+.3f}{verdict}"


def late(run: Run) -> float:
    """Mean reward over the last fifth of the steps."""
    return statistics.fmean(run.rewards[-max(1, len(run.rewards) // 5) :])


def commit_of_code() -> str:
    """Of the tree that runs, marked where something in it is not committed; the results themselves do not count."""
    root = Path(__file__).parents[2]

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=root, check=True, capture_output=True, text=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/trends/results")
    return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")


if __name__ == "__main__":
    main()
