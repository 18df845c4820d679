"""A run that loses too much ends and says so; servers and rewards have budgets of their own."""

import asyncio
import random

import pytest

from asyppo_async.config.failures import FailuresSection
from asyppo_async.errors import ContractBroken, TooManyLost
from asyppo_async.trainer.coordinator.generated import Generated
from asyppo_async.trainer.coordinator.lost_responses import LostResponses
from asyppo_async.trainer.coordinator.rewards import RewardPool
from asyppo_async.types import Prompt
from tests.unit.coordinator.test_loop import STEPS, ScriptedFleet, config_with, rewards, world

__all__ = ["rewards"]  # the fixture

SETTINGS = FailuresSection(window_responses=20, infrastructure_share=0.25, reward_share=0.5)


def test_losses_within_both_budgets_are_counted_over_the_run_and_a_resume() -> None:
    lost = LostResponses(SETTINGS, {"late_reward": 3})
    for _ in range(50):
        lost.keep(10)
        for _ in range(5):
            lost.lose("failed_reward", "KeyError")
        lost.keep(3)
        lost.lose("deadline", "late", 2)
    assert lost.by_reason == {"late_reward": 3, "failed_reward": 250, "deadline": 100}


def test_losses_of_servers_beyond_their_budget_end_the_run_whatever_rewards_may_lose() -> None:
    lost = LostResponses(SETTINGS)
    lost.keep(14)
    lost.lose("garbled", "server a: Generate 1: breaks the contract", 4)
    lost.lose("deadline", "late")
    with pytest.raises(TooManyLost, match=r"20 responses 6 were lost by servers \(garbled 4, deadline 2\)"):
        lost.lose("deadline", "prompt=p7: sample 1: not finished in 3 s")


def test_losses_of_rewards_beyond_their_budget_end_the_run_with_the_last_words() -> None:
    lost = LostResponses(SETTINGS)
    lost.keep(9)
    for number in range(10):
        lost.lose("failed_reward", f"prompt=p{number}: KeyError")
    with pytest.raises(
        TooManyLost, match=r"11 were lost by rewards .*reward_share = 0\.5.*prompt=p11: KeyError"
    ):
        lost.lose("late_reward", "prompt=p11: KeyError")


def test_losses_are_not_judged_before_the_window_is_full_and_old_ones_are_forgotten() -> None:
    lost = LostResponses(SETTINGS)
    for _ in range(19):
        lost.lose("deadline", "late")
    lost.keep(20)
    lost.lose("deadline", "late")
    assert lost.by_reason == {"deadline": 20}


class GarbledFleet(ScriptedFleet):
    """Every third call breaks the contract."""

    async def generate(self, prompt: Prompt, **settings: object) -> Generated:
        self.calls += 1
        if self.calls % 3 == 0:
            raise ContractBroken("server scripted: Generate: breaks the contract: 3 tokens, 2 log-probs")
        return await super().generate(prompt, **settings)  # type: ignore[arg-type]


async def test_group_that_breaks_the_contract_is_drawn_again_and_counted(rewards: RewardPool) -> None:
    fleet = GarbledFleet(random.Random(0), stragglers=0.0)
    made = world(config_with(), rewards, fleet)
    await made.run(asyncio.Event())
    counts = made.core.counts()
    assert counts.trained == 3 * STEPS and counts.dropped == 0
    assert made.rollouts.lost_members == {"garbled": 2 * counts.returned_by_reason["garbled"]}
