"""How hard the prompts are that a selection trains on, and what the policy is worth on all of them, by 32 samples each.

p_ref of a prompt is the share of right ones among fresh responses of the policy as it is at a stage of its run. How
often .2 < p_ref <= .8 holds is told of the prompts that were trained on just before, and of all; the mean of p_ref over
all prompts is the policy's accuracy, whatever it was trained on.
"""

import asyncio
import statistics
from collections.abc import Sequence

from benchmarks.trends.arm_run import open_arm
from benchmarks.trends.arms import Arm
from benchmarks.trends.critic_arms import daps_arms
from benchmarks.trends.pretrained import sampled

Rows = list[dict[str, float | str]]
STAGES = (20, 40, 60, 80)
WINDOW = 10
"""Steps before a stage whose prompts are looked at."""
SAMPLES = 32
LOWEST, HIGHEST = 0.2, 0.8


def reference_success(seed: int) -> Rows:
    """Every arm of the DAPS study at every stage."""
    return [row for arm in daps_arms() for row in asyncio.run(_of_arm(arm, seed))]


async def _of_arm(arm: Arm, seed: int) -> Rows:
    run = await open_arm(arm, seed)
    trained: list[list[str]] = []
    rows: Rows = []
    for stage in STAGES:
        while run.step < stage:
            result, _ = await run.train()
            trained.append([group.prompt.id for group in result.batch.groups])
        right: dict[str, list[bool]] = {}
        for one in sampled(run.policy, arm.task, SAMPLES, seed=1000 * seed + stage):
            right.setdefault(one.prompt.id, []).append(one.reward >= 1)
        p_ref = {prompt: statistics.fmean(verdicts) for prompt, verdicts in right.items()}
        drawn = [p_ref[prompt] for prompts in trained[-WINDOW:] for prompt in prompts]
        rows.append(
            {
                "arm": arm.name,
                "stage": stage,
                "accuracy": statistics.fmean(p_ref.values()),
                "middle_of_all": _middle(list(p_ref.values())),
                "middle_of_trained": _middle(drawn),
            }
        )
    return rows


def _middle(shares: Sequence[float]) -> float:
    return statistics.fmean(LOWEST < share <= HIGHEST for share in shares)
