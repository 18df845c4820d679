"""Samplers that choose, groups that teach nothing, and the running value of a prompt."""

import asyncio
from collections import Counter

import numpy as np
import pytest

from asyppo_async.config.load import config_from_tree
from asyppo_async.config.sections import TrainConfig
from asyppo_async.tasks.protocol import TaskSpec
from asyppo_async.trainer.coordinator.batch import batch_of
from asyppo_async.trainer.coordinator.choice_protocol import num_correct, teaches_nothing
from asyppo_async.trainer.coordinator.core import DecisionCore
from asyppo_async.trainer.coordinator.generated import Generated
from asyppo_async.trainer.coordinator.prompt_table import PromptTable
from asyppo_async.trainer.coordinator.rewards import RewardPool
from asyppo_async.trainer.coordinator.rollouts import Rollouts, RolloutSettings
from asyppo_async.trainer.coordinator.sampler import EpochSampler
from asyppo_async.trainer.coordinator.selection import SelectingSampler, open_selection
from asyppo_async.trainer.coordinator.waits import Waits
from asyppo_async.trainer.run_core import decision_settings
from asyppo_async.types import Prompt, Response, SamplingParams, VersionRuns
from tests.unit.coordinator.worked_batch import make_group

IDS = [f"p{index}" for index in range(10)]


def config_with(*overrides: str, preset: str = "s3ac") -> TrainConfig:
    tree = {"preset": preset, "actor": {"model": "a", "mini_batches": 1}, "critic": {"model": "c"}}
    return config_from_tree(
        tree, ["batch.prompts=2", "batch.group_size=2", "critic.mini_batches=1", *overrides]
    )


def opened(*overrides: str, preset: str = "s3ac", table: PromptTable | None = None) -> SelectingSampler:
    config = config_with(*overrides, preset=preset)
    sampler = open_selection(config, IDS, table or PromptTable(config.selection))
    assert sampler is not None
    return sampler


def accepted_of(sampler: SelectingSampler, num: int) -> Counter[str]:
    candidates = [sampler.next_candidate() for _ in range(num)]
    return Counter(candidate.prompt_id for candidate in candidates if candidate.accepted)


def test_selection_when_prompts_go_by_epochs_is_left_to_the_plain_sampler() -> None:
    config = config_with("selection.prompts=epochs")
    assert open_selection(config, IDS, PromptTable(config.selection)) is None


def test_daps_accepts_everything_at_first_and_then_by_value_and_history() -> None:
    sampler = opened("selection.uniform_steps=2", "selection.ramp_steps=0", "selection.minimum_acceptance=0")
    sampler.score({"p0": 1.0, "p1": -1.0, "p2": 0.0})
    assert sum(accepted_of(sampler, 300).values()) == 300
    for _ in range(2):
        sampler.end_step(1)
    accepted = accepted_of(sampler, 3000)
    assert accepted["p0"] == accepted["p1"] == 0, "certain, by the critics: 4 p (1 - p) = 0"
    assert accepted["p2"] > 200, "one half right: always accepted"
    sampler.record(
        make_group(3, [1, 1], [1.0, 1.0])
    )  # prompt p3, V = 0: p = (2 + 1.5) / 5 = .7, accepted .84
    share = accepted_of(sampler, 6000)["p3"] / 600
    assert 0.74 < share < 0.94


def test_daps_when_critics_disagree_about_a_certain_prompt_tries_it_all_the_same() -> None:
    sampler = opened(
        "critic.count=2",
        "selection.uniform_steps=0",
        "selection.ramp_steps=0",
        "selection.minimum_acceptance=0",
        "selection.floor_by_std=0.5",
    )
    sampler.score(dict.fromkeys(IDS, 1.0), {"p0": 1.0, "p1": 0.0})
    accepted = accepted_of(sampler, 4000)
    assert set(accepted) == {"p0"} and 0.4 < accepted["p0"] / 400 < 0.6


def test_daps_counts_its_candidates_by_the_success_that_it_expects() -> None:
    sampler = opened("selection.uniform_steps=0", "selection.ramp_steps=0", "selection.minimum_acceptance=1")
    sampler.score({prompt: 1.0 if prompt == "p0" else -0.5 for prompt in IDS})
    accepted = accepted_of(sampler, 200)
    row = sampler.metrics()
    # Without outcomes p = (V + 1) / 2 is 1 for the one prompt and .25 for the others.
    assert row["selection/candidates_tenth_10"] == accepted["p0"] > 0
    assert row["selection/candidates_tenth_3"] == 200 - accepted["p0"]
    assert sum(row[f"selection/candidates_tenth_{tenth}"] for tenth in range(1, 11)) == 200
    assert row["selection/candidates_per_accepted"] == 1


def test_daps_when_groups_come_back_tells_how_good_its_estimates_were() -> None:
    sampler = opened("selection.uniform_steps=5", "selection.prior_trials=1e9")
    sampler.score({"p0": 0.6, "p1": -0.6})  # p = .8 and .2, for no outcome weighs against such a prior
    drawn: set[str] = set()
    while not {"p0", "p1"} <= drawn:
        drawn.add(sampler.next_candidate().prompt_id)
    sampler.record(make_group(0, [1, 1], [1.0, -1.0]))
    sampler.record(make_group(1, [1, 1], [-1.0, -1.0]))
    sampler.record(make_group(1, [1, 1], [1.0, 1.0]))  # nobody expected anything of a second group
    row = sampler.metrics()
    assert row["selection/success_brier"] == pytest.approx((0.04 + 0.64 + 0.04 + 0.04) / 4)
    assert row["selection/success_auc"] == pytest.approx((1 + 1 + 0.5) / 3)
    assert "selection/success_brier" not in sampler.metrics(), "since the last call"


def test_daps_decides_alike_after_a_seek() -> None:
    one, other = opened("selection.uniform_steps=0"), opened("selection.uniform_steps=0")
    for _ in range(37):
        one.next_candidate()
    other.seek(37)
    assert [one.next_candidate() for _ in range(20)] == [other.next_candidate() for _ in range(20)]


def test_daps_steps_count_optimizer_steps_if_asked() -> None:
    sampler = opened(
        "selection.uniform_steps=8",
        "selection.ramp_steps=0",
        "selection.schedule_unit=gradient_step",
        "selection.minimum_acceptance=0",
    )
    sampler.score(dict.fromkeys(IDS, 1.0))
    sampler.end_step(7)
    assert sum(accepted_of(sampler, 50).values()) == 50
    sampler.end_step(1)
    assert sum(accepted_of(sampler, 50).values()) == 0


def test_upcoming_candidates_are_those_that_come() -> None:
    sampler = opened()
    expected = sampler.upcoming()
    assert set(expected) == {sampler.next_candidate().prompt_id for _ in range(2 * 4)}


def test_pcl_takes_one_of_every_k_candidates_nearest_to_the_target() -> None:
    sampler = opened("selection.prompts=pcl", "selection.pcl_candidates=5")
    values = {prompt: index / 5 - 0.9 for index, prompt in enumerate(IDS)}
    sampler.score(values)
    for _ in range(20):
        block = [sampler.next_candidate() for _ in range(10)]
        taken = [candidate.prompt_id for candidate in block if candidate.accepted]
        assert len(taken) == 2
        nearest = sorted(abs(values[candidate.prompt_id]) for candidate in block)[:2]
        assert sorted(abs(values[prompt]) for prompt in taken) == pytest.approx(nearest)


def test_greso_goes_by_epochs_and_skips_what_kept_being_all_right() -> None:
    sampler = opened("selection.prompts=greso")
    first = accepted_of(sampler, 10)
    assert sorted(first) == sorted(IDS) and set(first.values()) == {1}
    for _ in range(6):
        sampler.record(make_group(0, [1, 1], [1.0, 1.0]))
    accepted = accepted_of(sampler, 2000)
    assert accepted["p1"] == 200
    assert accepted["p0"] <= 12, "kept with probability max(.5^6, .01) = .0156"
    sampler.record(make_group(0, [1, 1], [1.0, -1.0]))
    assert accepted_of(sampler, 100)["p0"] == 10


def test_spo_draws_by_the_uncertainty_of_the_table_and_forgets_as_the_policy_moves() -> None:
    config = config_with(preset="spo")
    table = PromptTable(config.selection)
    sampler = opened(preset="spo", table=table)
    batch = batch_of(0, [make_group(0, [1, 1], [1.0, 1.0]), make_group(1, [1, 1], [1.0, -1.0])], config)
    priors = table.take(batch)
    # N_0 = 1 / (1 - .875) = 8, alpha = beta = 4; factor at D = 0 is the largest, .96.
    after_one_right = (0.96 * 4 + 1) / (0.96 * 8 + 1)
    np.testing.assert_allclose(priors, [0.5, after_one_right, 0.5, after_one_right])
    for _ in range(100):
        table.take(batch)
    assert table.value_of("p0") > 0.99 and table.weight_of("p0") < 0.3
    accepted = accepted_of(sampler, 4000)
    assert accepted["p0"] < 0.4 * accepted["p1"]
    table.advance(10.0)
    wrong = batch_of(1, [make_group(0, [1], [-1.0])], config)
    table.take(wrong)
    # 200 right answers at .96 make alpha = 25; the policy has moved, so they are forgotten by .875.
    assert table.value_of("p0") == pytest.approx(0.875 * 25 / (0.875 * 25 + 1), abs=1e-3)


def test_group_teaches_nothing_when_its_verdicts_are_all_equal() -> None:
    assert teaches_nothing(make_group(0, [1, 1], [1.0, 1.0])) == "all_right"
    assert teaches_nothing(make_group(0, [1, 1], [-1.0, 0.5])) == "all_wrong"
    assert teaches_nothing(make_group(0, [1, 1], [1.0, -1.0])) is None
    assert num_correct(make_group(0, [1, 1], [1.0, 0.99])) == 1


class AlternatingGenerator:
    """Every other group is all right, the rest are mixed."""

    def __init__(self) -> None:
        self.calls = 0

    async def generate(
        self, prompt: Prompt, *, num_samples: int, on_tokens: object, **_: object
    ) -> Generated:
        self.calls += 1
        same = self.calls % 2 == 0
        return Generated(
            responses=tuple(
                Response(
                    token_ids=np.array([1 if same or index == 0 else 0], dtype=np.int32),
                    behaviour_logprobs=np.array([-0.5], dtype=np.float32),
                    versions=VersionRuns(((0, 1),)),
                    finish_reason="stop",
                )
                for index in range(num_samples)
            ),
            server="scripted",
        )


async def test_dynamic_sampling_replaces_groups_that_teach_nothing_and_tells_of_all() -> None:
    config = config_with(
        "selection.prompts=epochs", "run.num_steps=4", "staleness.max_staleness=3", "staleness.lead=saturated"
    )
    prompts = {name: Prompt(id=name, task="t", text="1+2=", token_ids=(1,), answer="3") for name in IDS}
    core = DecisionCore(
        settings=decision_settings(config),
        sampler=EpochSampler(prompt_ids=IDS, seed=0, num_epochs=None),
        debug=True,
    )
    seen: list[str | None] = []
    spec = TaskSpec(name="arithmetic", seed=0, system_prompt="", params={})
    async with RewardPool(specs=(spec,), num_children=1, score_deadline_s=20, start_deadline_s=60) as pool:
        rollouts = Rollouts(
            core=core,
            prompts=prompts,
            generator=AlternatingGenerator(),  # type: ignore[arg-type]
            rewards=pool,
            decode=lambda ids: "3#3" if ids[0] else "3#4",
            settings=RolloutSettings(
                group_size=2,
                sampling=SamplingParams(
                    temperature=1.0, top_p=1.0, top_k=0, min_tokens=0, max_tokens=8, stop_token_ids=(0,)
                ),
                group_deadline_s=30,
                filter_groups=True,
            ),
            changed=(changed := asyncio.Condition()),
            waits=Waits(),
            on_group=lambda group: seen.append(teaches_nothing(group)),
        )
        core.served(0)
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(rollouts.run())
            async with changed:
                await changed.wait_for(lambda: core.counts().queued == 8)
            running.cancel()
    counts = core.counts()
    assert counts.queued == 8 and dict(counts.filtered_by_reason).keys() == {"all_right"}
    assert counts.filtered == seen.count("all_right") > 0
    assert core.token_counts().filtered == 2 * counts.filtered
    core.check()


def test_age_of_a_start_value_is_counted_from_its_scoring_to_the_acceptance() -> None:
    sampler = opened("selection.uniform_steps=100")  # every candidate is accepted
    sampler.score(dict.fromkeys(IDS[:5], 0.0))
    sampler.end_step(1)
    sampler.end_step(1)
    sampler.score({"p0": 0.5})
    drawn = accepted_of(sampler, 200)
    row = sampler.metrics()
    old = sum(drawn[prompt] for prompt in IDS[1:5])
    assert (row["selection/start_value_age_0"], row["selection/start_value_age_2"]) == (drawn["p0"], old)
    assert row["selection/start_value_age_mean_steps"] == pytest.approx(2 * old / (old + drawn["p0"]))
    assert row["selection/start_value_unknown_share"] == pytest.approx(1 - (old + drawn["p0"]) / 200)
    assert not [name for name in sampler.metrics() if "start_value" in name], "since the last call"


def test_daps_counts_partial_rewards_as_told() -> None:
    for kind, expected in (("fraction", 0.75), ("binary", 0.0)):
        sampler = opened(
            f"selection.partial_rewards={kind}", "selection.uniform_steps=0", "selection.prior_trials=1e-9"
        )
        for prompt in range(len(IDS)):
            sampler.record(make_group(prompt, [1], [0.5]))
        assert sampler.next_candidate().success_estimate == pytest.approx(expected, abs=1e-6)
