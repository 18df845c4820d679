"""What is decided once a batch stays decided: masks over all epochs, and the clip of every critic on its own."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyppo_async.trainer.coordinator.measures.updates import update_metrics
from asyppo_async.trainer.worker.messages import OptimizerStep, TrainResult
from tests.unit.composition.tiny import open_run, shrunk

EPOCHS = 4
STEP = OptimizerStep(
    loss=1.0,
    grad_norm=0.0,
    learning_rate=1e-3,
    skipped=False,
    num_tokens=3,
    entropy=0.5,
    clip_fraction_low=0.0,
    clip_fraction_high=0.0,
    ratio_mean=1.0,
    ratio_max=1.0,
    kl_proximal=0.0,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


async def test_masks_stay_over_all_epochs_while_the_policy_moves_away() -> None:
    run, _, _ = open_run(shrunk("asyppo", f"actor.epochs={EPOCHS}"))
    result, metrics = await run.train()
    assert result.actor is not None
    weights = result.decisions.policy_weights
    num_tokens = len(weights)
    assert int((weights == 0).sum()) == int(0.2 * num_tokens + 1e-9) > 0
    epochs = np.array_split(np.array(result.actor.steps, dtype=object), EPOCHS)
    assert [sum(step.num_tokens for step in epoch) for epoch in epochs] == [
        int((weights != 0).sum())
    ] * EPOCHS
    # The ratios of the last epoch would reject other tokens: had the masks been made anew, they would have moved.
    assert epochs[-1][-1].ratio_max > 1.05 > epochs[0][0].ratio_max
    assert metrics["value_std/advantage_masked_share"] == pytest.approx(0.2, abs=1 / num_tokens)
    assert 0.4 < metrics["actor/ratio_p1"] < 1 < metrics["actor/ratio_p99"] <= metrics["actor/ratio_max"]
    assert result.actor.steps[0].masked_clip_fraction == 0, "every ratio of the first update is 1"
    assert 0 <= metrics["actor/masked_clip_fraction"] <= 1


def test_clipped_share_of_hand_norms_counts_those_beyond_the_threshold() -> None:
    norms = [9.0, 10.0, 11.0, 45.025]
    steps = [replace(STEP, grad_norm=norm) for norm in norms]
    skipped = replace(STEP, grad_norm=99.0, skipped=True)
    row = update_metrics("critic_0", TrainResult(steps=(*steps, skipped), compute_s=1.0), clip_norm=10.0)
    assert row["critic_0/clipped_share"] == 0.5 and row["critic_0/skipped_steps"] == 1


async def test_clip_of_the_critics_is_s3acs_ten_and_not_the_actors() -> None:
    config = shrunk("s3ac")
    assert (config.actor.max_grad_norm, config.critic.max_grad_norm) == (1.0, 10.0)
    for threshold, share in (("1e-9", 1.0), ("1e9", 0.0)):
        run, _, _ = open_run(shrunk("s3ac", f"critic.max_grad_norm={threshold}", "actor.max_grad_norm=1e9"))
        _, metrics = await run.train()
        shares = [metrics[f"critic_{index}/clipped_share"] for index in range(config.critic.count)]
        assert shares == [share] * config.critic.count and metrics["actor/clipped_share"] == 0.0
