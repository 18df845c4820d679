"""The harness of the tiny-model studies: what its figures rest on."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.trends.arm_run import open_arm
from benchmarks.trends.arms import Arm
from benchmarks.trends.comparison import compare
from benchmarks.trends.critic_arms import SCORED
from benchmarks.trends.critic_tasks import LONG
from benchmarks.trends.evidence import PAGE, PLOTS, page_with_tables
from benchmarks.trends.learning import BFLOAT16, FLOAT8_WEIGHTS, FLOAT32
from benchmarks.trends.measuring import sample_all
from benchmarks.trends.results import Results, Run
from benchmarks.trends.std_and_gradients import rank_correlation
from benchmarks.trends.studies import STUDIES
from benchmarks.trends.study import one_run
from benchmarks.trends.tables import BLOCKS
from benchmarks.trends.task import NUM_TOKENS, open_study_run

GRPO = Arm(name="g", against="g", preset="grpo")


def test_compare_of_hand_numbers_gives_the_paired_t_and_the_exact_p() -> None:
    # Differences 1, 2, 3: mean 2, std 1, t = 2 / (1 / sqrt 3). Of the 8 ways to flip signs, +++ and --- reach 6.
    test = compare([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert test.difference == pytest.approx(2.0)
    assert test.t == pytest.approx(2 * math.sqrt(3))
    assert test.p == pytest.approx(2 / 8)
    # Differences 3, -1, 1 sum to 3; the flips reach 5, 3, 3, 1 and their negatives.
    assert compare([3.0, 0.0, 1.0], [0.0, 1.0, 0.0]).p == pytest.approx(6 / 8)
    assert math.isnan(compare([1.0, 2.0], [1.0, 2.0]).t) and compare([1.0], [1.0]).p == 1.0


def test_rank_correlation_of_hand_numbers_is_spearmans() -> None:
    one, other = torch.tensor([0.1, 5.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 40.0, 30.0])
    # Ranks 0 3 1 2 and 0 1 3 2: 1 - 6 (4 + 4) / (4 * 15) = 0.2.
    assert rank_correlation(one, other) == pytest.approx(0.2)
    assert rank_correlation(one, one.exp()) == pytest.approx(1.0)


def test_results_when_read_again_hold_each_arm_and_seed_once(tmp_path: Path) -> None:
    def run(seed: int, spec: str, reward: float) -> Run:
        return Run(
            arm="a",
            seed=seed,
            num_steps=1,
            spec=spec,
            commit="c",
            cpu_s=1.0,
            num_tokens=3,
            rewards=[reward],
            figures={},
        )

    results = Results("s", tmp_path)
    for seed, spec, reward in ((1, "x", 0.1), (0, "x", 0.2), (1, "y", 0.3)):
        results.add(run(seed, spec, reward))
    again = Results("s", tmp_path)
    assert [one.rewards for one in again.of_arm("a")] == [[0.2], [0.3]]
    assert again.run("a", 1, spec="x", num_steps=1) is None
    assert again.run("a", 1, spec="y", num_steps=1) == run(1, "y", 0.3)


@pytest.mark.parametrize("study", [name for name, study in STUDIES.items() if study.arms])
def test_arms_of_a_study_have_names_and_baselines_of_their_own(study: str) -> None:
    arms = STUDIES[study].arms
    names = [arm.name for arm in arms]
    assert len(set(names)) == len(names) and {arm.against for arm in arms} <= set(names)
    assert len({arm.spec for arm in arms if arm.engine is FLOAT32 and arm.lag == 0}) > 1
    for arm in arms:
        assert arm.config(3).run.seed == 3


def test_evidence_shows_what_the_studies_stored_for_the_arms_as_they_are_now() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page_with_tables(page) == page
    for name in BLOCKS:
        plot = PLOTS / f"{name}.svg"
        assert plot.is_file() and f"({plot.relative_to(PAGE.parent).as_posix()})" in page
    for name, study in STUDIES.items():
        results = Results(name)
        for arm in study.arms:
            stored = results.of_arm(arm.name)
            assert len({run.seed for run in stored}) == len(stored) >= study.least_seeds, arm.name
            assert all((run.spec, run.num_steps) == (arm.spec, study.num_steps) for run in stored), arm.name


async def test_a_run_of_a_study_repeated_gives_the_same_rewards_and_the_tokens_of_every_other() -> None:
    torch.set_num_threads(1)
    first, again = [await one_run(GRPO, seed=0, num_steps=2, commit="c") for _ in range(2)]
    assert first.rewards == again.rewards
    other = Arm(name="o", against="o", preset="asyppo")
    assert first.num_tokens == (await one_run(other, seed=0, num_steps=2, commit="c")).num_tokens
    assert first.num_tokens == 2 * 8 * 8 * NUM_TOKENS


def test_an_engine_of_lower_precision_samples_from_other_probabilities_than_the_trainers() -> None:
    run = open_study_run(GRPO.config(0), lag=0, actor_size=32, critic_size=16)
    gaps = []
    for engine in (FLOAT32, BFLOAT16, FLOAT8_WEIGHTS):
        sampled = sample_all(run.policy, engine, 0, num_samples=1)
        own = sampled.distribution(run.policy).logprobs.detach()
        gaps.append(float((own - sampled.behaviour_logprobs).abs().mean()))
    assert gaps[0] < 1e-6 and gaps[0] * 100 < gaps[1] < gaps[2]


async def test_a_pretrained_arm_starts_from_the_same_policy_with_other_critics() -> None:
    torch.set_num_threads(1)
    plain = Arm(name="plain", against="plain", preset="vcppo", task=LONG, overrides=(SCORED,))
    taught = replace(plain, name="taught", pretrain_steps=2)
    one, other = await open_arm(plain, 0), await open_arm(taught, 0)
    for mine, theirs in zip(one.policy.module.parameters(), other.policy.module.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    heads = [run.critics[0].module["value_head"].weight for run in (one, other)]
    assert not torch.equal(*heads) and other.step == 0
