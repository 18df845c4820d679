"""Best of n responses by a critic against a majority vote and the first sample, on a policy that is still learning."""

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from asyppo_async.algorithms.best_of import SCORES, choose_best, majority
from asyppo_async.trainer.coordinator.critic_side import CriticSide
from asyppo_async.trainer.coordinator.trace import Trace
from asyppo_async.trainer.pretrain.pool_batches import batch_of_singles
from asyppo_async.types import Trajectory
from benchmarks.trends.arm_run import open_arm
from benchmarks.trends.arms import Arm
from benchmarks.trends.critic_arms import LEARN_ALIKE, SHORT_RAMP
from benchmarks.trends.critic_tasks import PARITY
from benchmarks.trends.learning import local_critics
from benchmarks.trends.pretrained import sampled
from benchmarks.trends.task import NUM_WANTED

Rows = list[dict[str, float | str]]
STEPS = (15, 30)
NUMBERS = (1, 2, 4, 8, 16)
LEARNER = Arm(
    name="learner", against="learner", preset="s3ac",
    overrides=(*LEARN_ALIKE, "actor.mini_batches=2", "critic.mini_batches=2", *SHORT_RAMP, "selection.prompts=epochs"),
    task=PARITY,
)  # fmt: skip


def best_of_n(seed: int) -> Rows:
    """Accuracy by way of choosing, stage and n."""
    return asyncio.run(_best_of_n(seed))


async def _best_of_n(seed: int) -> Rows:
    run = await open_arm(LEARNER, seed)
    rows: Rows = []
    for stage in STEPS:
        while run.step < stage:
            await run.train()
        responses = sampled(run.policy, PARITY, max(NUMBERS), seed=seed)
        batch = batch_of_singles(0, responses, LEARNER.config(seed))
        side = CriticSide(LEARNER.config(seed), local_critics(LEARNER.config(seed), run.critics))
        values = (await side.values(batch, Trace())).of_tokens[0]
        per_response = np.split(values, np.cumsum(batch.lengths)[:-1])
        for number in NUMBERS:
            rows += [
                {"stage": stage, "n": number, "way": way, "accuracy": accuracy}
                for way, accuracy in _accuracies(responses, per_response, number).items()
            ]
    return rows


def _accuracies(
    responses: Sequence[Trajectory], values: Sequence[NDArray[np.float32]], number: int
) -> dict[str, float]:
    groups: dict[str, list[int]] = {}
    for index, one in enumerate(responses):
        groups.setdefault(one.prompt.id, []).append(index)
    right: dict[str, list[bool]] = {}
    for members in groups.values():
        among = members[:number]
        chosen = {
            f"critic, {how}": among[choose_best([values[index] for index in among], how)] for how in SCORES
        }
        chosen["majority"] = among[majority([_answer(responses[index]) for index in among])]
        chosen["first"] = among[0]
        for way, index in chosen.items():
            right.setdefault(way, []).append(responses[index].reward >= 1)
        right.setdefault("any", []).append(any(responses[index].reward >= 1 for index in among))
    return {way: float(np.mean(found)) for way, found in right.items()}


def _answer(one: Trajectory) -> str | None:
    """The parity that a response gives; None: it is of neither."""
    odd = int(sum(token % 2 for token in one.response.token_ids.tolist()))
    if odd >= NUM_WANTED:
        return "odd"
    return "even" if one.num_tokens - odd >= NUM_WANTED else None
