"""Every switch of the arithmetic, against numbers by hand and the worked batches of `algorithms.md` 1.6 and 3.4."""

from typing import Any

import numpy as np
import pytest
import torch

from asyppo_async.algorithms.policy_losses import LossInputs, policy_loss
from asyppo_async.config.load import config_from_tree
from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import ConfigError
from asyppo_async.trainer.coordinator.arithmetic import (
    TokenDecisions,
    actor_request,
    critic_requests,
    decide_tokens,
)
from asyppo_async.trainer.coordinator.batch import Batch, batch_of, with_end_states
from asyppo_async.trainer.coordinator.estimators import Baselines
from asyppo_async.trainer.coordinator.loss_terms import proximal_by_age, reference_of
from asyppo_async.trainer.coordinator.memory import StepMemory
from asyppo_async.types import Group, Response
from tests.unit.composition.tiny import open_run, shrunk
from tests.unit.coordinator.worked_batch import LENGTHS, VALUE_STD, VALUES, make_group, worked_groups

PROXIMAL = np.full(10, -0.5, dtype=np.float32)
NO_CRITIC = np.zeros((0, 10), dtype=np.float32)
BY_VALUE = np.array(VALUES, dtype=np.float32)


def config_with(*overrides: str, preset: str = "asyppo") -> TrainConfig:
    tree = {"preset": preset, "actor": {"model": "a"}, "critic": {"model": "c"}}
    sizes = ["batch.prompts=2", "batch.group_size=2", "actor.mini_batches=1", "critic.mini_batches=1"]
    return config_from_tree(tree, [*sizes, *overrides])


def decide(
    config: TrainConfig,
    *,
    groups: list[Group] | None = None,
    values: np.ndarray = BY_VALUE,
    proximal: np.ndarray = PROXIMAL,
    **others: object,
) -> tuple[Batch, TokenDecisions]:
    batch = batch_of(0, groups or worked_groups(), config)
    stale = np.zeros(len(proximal), dtype=np.bool_)
    decisions = decide_tokens(
        batch,
        values[: config.critic.count],
        proximal,
        stale=stale,
        algorithm=config.algorithm,
        **others,  # type: ignore[arg-type]
    )
    return batch, decisions


def truncated(group: Group, *members: int) -> Group:
    """The group with some of its responses cut at maximum length."""
    trajectories = list(group.trajectories)
    for member in members:
        old = trajectories[member].response
        cut = Response(
            token_ids=old.token_ids,
            behaviour_logprobs=old.behaviour_logprobs,
            versions=old.versions,
            finish_reason="length",
        )
        trajectories[member] = _replace(trajectories[member], response=cut)
    return _replace(group, trajectories=tuple(trajectories))


def _replace(value, **changes):
    return type(value)(**{name: getattr(value, name) for name in value.__slots__} | changes)


@pytest.mark.parametrize(
    ("preset", "overrides", "right", "wrong"),
    [
        ("grpo", (), 0.7071063, -0.7071063),
        ("grpo", ("algorithm.group_std_unbiased=false",), 0.999999, -0.999999),
        ("drgrpo", (), 1.0, -1.0),
        ("rloo", (), 2.0, -2.0),
        ("reinforce_pp", (), 0.6546536668, -1.5275252226),
        ("reinforce_pp", ("algorithm.whiten_unbiased=true",), 0.6210590001, -1.4491376669),
        ("reinforce_pp", ("algorithm.estimator=reinforce_pp_baseline",), 0.6546536668, -1.5275252226),
        ("flash_reinforce", (), 1.0, -1.0),
        (
            "grpo",
            ("algorithm.estimator=dr_grpo", "algorithm.whiten_advantages=batch"),
            0.65465367,
            -1.52752522,
        ),
        # Groups of 3 + 2 and 4 + 1 tokens: (1 - mean) / std with means .2 and .6, variances .96 and .64.
        ("grpo", ("algorithm.estimator=dr_grpo", "algorithm.whiten_advantages=group"), None, None),
    ],
)
def test_estimator_without_critics_gives_the_numbers_of_its_paper(
    preset: str, overrides: tuple[str, ...], right: float | None, wrong: float | None
) -> None:
    _, decisions = decide(config_with(*overrides, preset=preset))
    if right is None:
        expected = np.repeat([0.8165, -1.2247, 0.5, -2.0], LENGTHS)
    else:
        expected = np.repeat([right, wrong, right, wrong], LENGTHS)
    np.testing.assert_allclose(decisions.advantages, expected, rtol=2e-5, atol=2e-4 if right is None else 0)
    assert (decisions.value_std == 0).all() and not decisions.std_masks.num_advantage_masked


def test_spo_compares_with_the_prompt_before_the_response() -> None:
    _, decisions = decide(
        config_with(preset="spo"),
        baselines=Baselines(values=NO_CRITIC, priors=np.array([0.75, 0.5, 0.5, 0.25])),
    )
    raw = np.array([0.25, -0.5, 0.5, -0.25])
    np.testing.assert_allclose(decisions.advantages, np.repeat(raw / raw.std(), LENGTHS), rtol=1e-6)


def test_evpo_takes_the_mean_where_critics_explain_nothing() -> None:
    overrides = ("algorithm.estimator=evpo", "algorithm.schedule=pre")
    useless = -np.repeat([[1.0, -1.0, 1.0, -1.0]], LENGTHS, axis=1).astype(np.float32)
    _, decisions = decide(config_with(*overrides, preset="ppo"), values=useless)
    np.testing.assert_allclose(decisions.advantages, np.repeat([0.6, -1.4, 0.6, -1.4], LENGTHS), atol=1e-6)
    _, decisions = decide(config_with(*overrides, preset="ppo"), values=-0.5 * useless)
    np.testing.assert_allclose(decisions.advantages, np.repeat([0.5, -0.5, 0.5, -0.5], LENGTHS), atol=1e-6)


def test_crossfit_uses_only_the_critic_that_has_not_seen_the_response() -> None:
    batch, decisions = decide(config_with("algorithm.advantage_values=crossfit"))
    blind = np.repeat(1 - batch.trained_on().argmax(axis=0), LENGTHS)
    returns = np.repeat(batch.rewards, LENGTHS)
    np.testing.assert_allclose(decisions.advantages, returns - BY_VALUE[blind, np.arange(10)], atol=1e-6)


def test_confidence_moves_from_equal_weights_towards_the_critic_that_was_right() -> None:
    config = config_with("algorithm.value_aggregation=confidence", "algorithm.calibration_rate=1.0")
    right = np.repeat([0.9, -0.9, 0.9, -0.9], LENGTHS)
    values = np.stack([right, -right]).astype(np.float32)
    batch, first = decide(config, values=values)
    np.testing.assert_allclose(first.advantages, np.repeat(batch.rewards, LENGTHS), atol=1e-6)
    _, second = decide(config, values=values, memory=first.memory)
    # Errors .1^2 = .01 and 1.9^2 = 3.61 in bins that were measured, 1 where a critic was never tested.
    assert (
        float((second.advantages - torch.from_numpy(np.repeat(batch.rewards, LENGTHS) - right)).abs().min())
        < 0.02
    )


@pytest.mark.parametrize(
    ("rule", "worth"), [("scored", 1.0), ("finished", -1.0), ("egae", 0.35), ("bootstrap", 0.6)]
)
def test_truncated_response_ends_as_the_rule_says(rule: str, worth: float) -> None:
    groups = worked_groups()
    groups[0] = truncated(groups[0], 0)
    config = config_with(f"algorithm.truncated={rule}")
    ends = np.array([[0.5, 0, 0, 0], [0.7, 0, 0, 0]], dtype=np.float32)
    batch, decisions = decide(config, groups=groups, baselines=Baselines(values=BY_VALUE, end_values=ends))
    # With lambda = 1 an advantage is (reward + V(s_T)) - V(s_t).
    np.testing.assert_allclose(decisions.advantages[:3], worth - BY_VALUE.mean(axis=0)[:3], atol=1e-6)
    np.testing.assert_allclose(decisions.advantages[3:5], -1 - BY_VALUE.mean(axis=0)[3:5], atol=1e-6)
    requests = critic_requests(
        batch,
        values=BY_VALUE,
        trained=np.ones(10, dtype=np.bool_),
        algorithm=config.algorithm,
        critic=config.critic,
        seed=0,
    )
    counted = sum(int((request.weights != 0).sum()) for request in requests)
    assert counted == (10 if rule in ("scored", "finished") else 7), "an unknown return trains no critic"
    assert (batch.correct == [True, False, True, False]).all(), "the verdict is not shaped"


def test_end_states_lie_behind_truncated_responses_only() -> None:
    groups = worked_groups()
    groups[1] = truncated(groups[1], 0, 1)
    batch = batch_of(0, groups, config_with())
    sequences, extra = with_end_states(batch.sequences, batch.truncated)
    assert sequences.response_lengths.tolist() == [3, 2, 5, 2]
    assert np.flatnonzero(extra).tolist() == [9, 11]
    np.testing.assert_array_equal(sequences.response_token_ids[~extra], batch.sequences.response_token_ids)


def test_overlong_responses_lose_reward_before_the_limit() -> None:
    config = config_with("algorithm.overlong_cache_tokens=4", "sampling.max_tokens=5", preset="grpo")
    batch = batch_of(0, worked_groups(), config)
    # 5 - 4 = 1: lengths 3, 2, 4, 1 are 2, 1, 3, 0 tokens into a cache of 4.
    np.testing.assert_allclose(batch.shaped_rewards, [0.5, -1.25, 0.25, -1.0])
    assert batch.rewards.tolist() == [1, -1, 1, -1]


def test_small_groups_when_all_critics_see_them_are_not_dealt() -> None:
    groups = [make_group(0, [2], [1.0]), make_group(1, [1, 3], [1.0, -1.0])]
    rotated = batch_of(0, groups, config_with())
    assert rotated.trained_on().sum(axis=0).tolist() == [1, 1, 1]
    everybody = batch_of(0, groups, config_with("critic.small_groups=all"))
    assert everybody.trained_on().sum(axis=0).tolist() == [2, 1, 1]


def test_selection_by_entropy_or_chance_takes_the_same_number_of_other_tokens() -> None:
    entropies = np.linspace(0, 1, 10, dtype=np.float32)[::-1].copy()
    _, by_std = decide(config_with())
    _, by_entropy = decide(config_with("algorithm.advantage_mask_by=entropy"), entropies=entropies)
    assert (~by_entropy.std_masks.advantage_keep).nonzero().squeeze(1).tolist() == [8, 9]
    _, highest = decide(
        config_with("algorithm.advantage_mask_by=entropy", "algorithm.advantage_mask_end=highest"),
        entropies=entropies,
    )
    assert (~highest.std_masks.advantage_keep).nonzero().squeeze(1).tolist() == [0, 1]
    chance = config_with("algorithm.advantage_mask_by=random", "algorithm.entropy_filter_by=random")
    _, one = decide(chance, seed=1)
    _, again = decide(chance, seed=1)
    _, other = decide(chance, seed=4)
    for decisions in (by_std, by_entropy, one, other):
        assert decisions.std_masks.num_advantage_masked == 2
    assert torch.equal(one.std_masks.advantage_keep, again.std_masks.advantage_keep)
    assert not torch.equal(one.std_masks.advantage_keep, one.std_masks.entropy_keep)
    assert not torch.equal(one.std_masks.advantage_keep, other.std_masks.advantage_keep)
    _, nothing = decide(config_with("algorithm.advantage_mask_by=none"))
    assert nothing.std_masks.num_advantage_masked == 0 and nothing.std_masks.num_entropy_filtered == 2


def test_selection_within_sequences_masks_nothing_of_short_ones() -> None:
    _, decisions = decide(config_with("algorithm.selection_scope=sequence"))
    assert decisions.std_masks.num_advantage_masked == 0, "floor(.2 T) is 0 for all four"
    _, sample = decide(config_with("algorithm.value_std_sample=true"))
    np.testing.assert_allclose(sample.value_std, np.array(VALUE_STD) * np.sqrt(2), rtol=1e-6)
    assert (~sample.std_masks.advantage_keep).nonzero().squeeze(1).tolist() == [1, 4]


# The batch of `algorithms.md` 1.6: values that give its advantages at lambda 1.
BEHAVIOUR = [-1.0, -0.5, -2.0, -0.3, -0.7, -4.0, -0.2]
OLD = np.array([-1.1, -0.5, -1.2, -0.25, -0.6, -2.0, -0.2], dtype=np.float32)
POLICY = [-0.9, -0.55, -1.0, -0.5, -0.6, -1.9, -0.3]
THREE_VALUES = np.array([[0.5, 1.5, 0, 0, 0, 0, 0]], dtype=np.float32)


def three_policies(*overrides: str, preset: str = "s3ac") -> tuple[float, TokenDecisions]:
    """The loss of the whole batch, token-mean, in float64."""
    config = config_with(
        "algorithm.lambda_actor=1.0", "batch.prompts=2", "actor.epochs=1", *overrides, preset=preset
    )
    groups = [
        make_group(0, [4], [1.0], logprobs=BEHAVIOUR[:4]),
        make_group(1, [3], [-1.0], logprobs=BEHAVIOUR[4:]),
    ]
    batch, decisions = decide(config, groups=groups, values=THREE_VALUES, proximal=OLD)
    request = actor_request(
        batch,
        decisions,
        OLD,
        algorithm=config.algorithm,
        actor=config.actor,
        sampling=config.sampling,
        seed=0,
    )
    policy = torch.tensor(POLICY, dtype=torch.float64)
    reference = torch.from_numpy(request.proximal_logprobs).double()
    terms = policy_loss(
        request.loss,
        LossInputs(
            policy_logprobs=policy,
            reference_logprobs=reference,
            log_ratio=policy - reference,
            advantages=torch.from_numpy(request.advantages).double(),
            lengths=torch.tensor([4, 3]),
            counted=torch.ones(7, dtype=torch.bool),
        ),
        clip_low=request.clip_low,
        clip_high=request.clip_high,
    ).terms
    (denominator,) = request.mini_batches.denominators
    return float((torch.from_numpy(request.policy_weights).double() * terms).sum() / denominator), decisions


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ((), "tp_s3ac_maskonly_mislog_den_orig"),
        (("algorithm.renormalise=true",), "tp_s3ac_maskonly_mislog_den_kept"),
        (('algorithm.sequence_gates=[{kind="max_ratio",high=5.0}]',), "tp_s3ac_maskonly_den_orig"),
        (
            ('algorithm.sequence_gates=[{kind="max_ratio",high=5.0}]', "algorithm.renormalise=true"),
            "tp_s3ac_maskonly_den_kept",
        ),
        (
            ('algorithm.sequence_gates=[{kind="max_ratio",high=5.0}]', "algorithm.mismatch=icepop"),
            "tp_s3ac_icepopweight_den_orig",
        ),
        (
            ("algorithm.loss=ppo", "algorithm.mismatch=none", "algorithm.sequence_gates=[]"),
            "tp_nocorrection_ppo",
        ),
        (
            (
                "algorithm.loss=ppo",
                "algorithm.mismatch=tis",
                "algorithm.mismatch_high=2.0",
                "algorithm.sequence_gates=[]",
            ),
            "tp_tis2_ppo_den_orig",
        ),
        (
            (
                "algorithm.loss=ppo",
                "algorithm.mismatch=clamp",
                "algorithm.mismatch_low=0",
                "algorithm.sequence_gates=[]",
            ),
            "tp_areal_decoupled_clamp5_den_orig",
        ),
        (
            ("algorithm.loss=ppo", "algorithm.mismatch=icepop", "algorithm.sequence_gates=[]"),
            "tp_areal_decoupled_cap5_den_orig",
        ),
        (
            (
                "algorithm.loss=ppo",
                "algorithm.loss_reference=behaviour",
                "algorithm.mismatch=none",
                "algorithm.sequence_gates=[]",
            ),
            "tp_bypass_ppo_u",
        ),
    ],
)
def test_loss_of_the_three_policy_batch_is_the_golden_one(
    overrides: tuple[str, ...], key: str, golden: dict[str, Any]
) -> None:
    # Clip bounds of 1.6: .2 and .28, as in the preset.
    assert three_policies(*overrides)[0] == pytest.approx(golden[key], rel=2e-5)


def test_opsm_and_m2po_take_out_what_their_rules_say() -> None:
    _, gone = three_policies("algorithm.opsm_threshold=0.1", "algorithm.sequence_gates=[]")
    assert gone.mismatch.keep_sequences.tolist() == [True, True], (
        "mean(log mu - log pi) = -.7: more likely now"
    )
    # log rho = [-.1, 0, .8, .05 | .1, 2, 0]: by size 2, .8, ...; mean square of the rest (.01 + .0025 + .01) / 5.
    _, kept = three_policies(
        "algorithm.m2po_threshold=0.04", "algorithm.m2po_candidates=all", "algorithm.mismatch=none"
    )
    assert kept.mismatch.keep_tokens.tolist() == [True, True, False, True, True, False, True]


def test_filtered_groups_train_critics_alone() -> None:
    filtered = np.array([True, True, False, False])
    _, decisions = decide(config_with(), filtered=filtered)
    assert (decisions.policy_weights[:5] == 0).all() and (decisions.entropy_weights[:5] == 0).all()
    assert bool(decisions.masks.value.all()) and not bool(decisions.masks.ranking[:5].any())
    assert decisions.std_masks.num_advantage_masked == 1, "floor(.2 * 5)"


def test_group_entropy_scales_advantages_from_the_second_batch_on() -> None:
    config = config_with("algorithm.group_entropy_scaling=true", preset="drgrpo")
    sharp = np.concatenate([np.full(5, -0.1), np.full(5, -2.0)]).astype(np.float32)
    _, first = decide(config, proximal=sharp, memory=StepMemory())
    assert set(first.advantages.tolist()) == {1.0, -1.0}
    assert first.memory.entropy is not None and first.memory.entropy.mean == pytest.approx(1.05)
    _, second = decide(config, proximal=sharp, memory=first.memory)
    assert second.advantages.tolist() == [0.5] * 3 + [-1.0] * 2 + [1.0] * 4 + [-0.20000000298023224]


def test_proximal_by_age_lies_between_behaviour_and_policy() -> None:
    groups = [make_group(0, [3], [1.0], logprobs=[-2.0] * 3, versions=[3, 5, 6])]
    batch = batch_of(6, groups, config_with("batch.group_size=1", preset="sao"))
    got = proximal_by_age(batch, np.full(3, -1.4, dtype=np.float32))
    np.testing.assert_allclose(got, [-1.6, -2.0, -2.0], rtol=1e-6)


def test_reference_of_two_policy_losses_is_the_behaviour() -> None:
    config = config_with("batch.group_size=2", preset="sao")
    batch, decisions = decide(config, proximal=PROXIMAL + 1)
    assert reference_of(batch, decisions.mismatch, PROXIMAL + 1, config.algorithm) is batch.behaviour_logprobs
    twice = config.algorithm.model_copy(
        update={"mismatch": "tis"}
    )  # no configuration that was checked is like that
    with pytest.raises(ConfigError, match="counts the mismatch twice"):
        reference_of(batch, decisions.mismatch, PROXIMAL + 1, twice)


async def test_kept_set_of_the_trainer_makes_the_engines_log_probs_its_own() -> None:
    torch.set_num_threads(1)
    overrides = ("sampling.top_k=6", "sampling.top_p=0.8", "actor.epochs=1", "actor.mini_batches=1")
    run, _, _ = open_run(shrunk("asyppo_faithful", *overrides))
    result, metrics = await run.train()
    assert metrics["mismatch/outside_kept_share"] == 0
    assert metrics["mismatch/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["mismatch/ratio_min"] == pytest.approx(1.0, abs=1e-4)
    assert result.actor is not None and result.actor.steps[0].ratio_max == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("preset", ["asyppo", "s3ac"])
@pytest.mark.parametrize(
    "override",
    [
        "algorithm.advantage_values=pre",
        "algorithm.truncated=bootstrap",
        "algorithm.truncated=egae",
        "algorithm.value_aggregation=min",
        "algorithm.critic_trains_on=kept",
        "critic.half_loss=false",
        "selection.group_filter=mask",
        "algorithm.proximal=a3po",
        "algorithm.kl_coefficient=0.01",
        "algorithm.m2po_threshold=0.04",
        "algorithm.opsm_threshold=0.01",
        "selection.prompts=pcl",
        "selection.prompts=greso",
    ],
)
async def test_switch_when_turned_still_trains(preset: str, override: str) -> None:
    torch.set_num_threads(1)
    run, _, _ = open_run(shrunk(preset, override), lag=1)
    for _ in range(2):
        result, _ = await run.train()
    assert result.actor is not None
    assert all(np.isfinite(step.loss) for step in result.actor.steps)
