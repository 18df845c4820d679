"""The arithmetic of a step against the worked numbers of AsyPPO and of the three-policy batch."""

from typing import Any

import numpy as np
import pytest
import torch

from asyppo_async.algorithms.losses import ppo_clip
from asyppo_async.config.load import config_from_tree
from asyppo_async.config.sections import TrainConfig
from asyppo_async.trainer.coordinator.arithmetic import actor_request, critic_requests, decide_tokens
from asyppo_async.trainer.coordinator.batch import build_batch, select_sequences, tokens_of
from asyppo_async.trainer.coordinator.staleness import token_bound
from tests.unit.coordinator.worked_batch import (
    ADVANTAGE_KEEP,
    ADVANTAGES,
    ENTROPY_KEEP,
    LENGTHS,
    REWARDS,
    VALUE_STD,
    VALUES,
    make_group,
    worked_groups,
)

PROXIMAL = np.full(10, -0.5, dtype=np.float32)
LOG_RATIO = [0.05, -0.10, 0.30, 0.0, -0.25, 0.10, 0.02, 0.26, -0.03, -0.30]
ENTROPY = [1.2, 0.5, 0.1, 0.8, 0.3, 2.0, 1.0, 0.2, 0.4, 1.5]


def config_with(*overrides: str) -> TrainConfig:
    tree = {"actor": {"model": "a"}, "critic": {"model": "c"}, "batch": {"prompts": 2, "group_size": 2}}
    return config_from_tree(tree, ["critic.mini_batches=1", "actor.mini_batches=1", *overrides])


def worked_batch(step: int = 0):
    return build_batch(step, worked_groups(), num_critics=2, critic_data="group_split", seed=0)


def decide(*overrides: str, proximal=PROXIMAL):
    batch = worked_batch()
    stale = np.zeros(10, dtype=np.bool_)
    values = np.array(VALUES, dtype=np.float32)
    return batch, decide_tokens(
        batch, values, proximal, stale=stale, algorithm=config_with(*overrides).algorithm
    )


def test_decisions_of_the_worked_batch_are_the_golden_ones() -> None:
    _, decisions = decide()
    np.testing.assert_allclose(decisions.value_std, VALUE_STD, atol=1e-7)
    np.testing.assert_allclose(decisions.advantages, ADVANTAGES, atol=1e-6)
    assert decisions.std_masks.advantage_keep.int().tolist() == ADVANTAGE_KEEP
    assert decisions.std_masks.entropy_keep.int().tolist() == ENTROPY_KEEP
    assert decisions.trainable


@pytest.mark.parametrize(
    ("aggregation", "key"),
    [("seq-mean-token-mean", "asy_loss_seqmean_tokenmean"), ("token-mean", "asy_loss_tokenmean")],
)
def test_request_of_the_worked_batch_gives_the_golden_loss(
    aggregation: str, key: str, golden: dict[str, Any]
) -> None:
    config = config_with(f"algorithm.aggregation={aggregation}")
    batch, decisions = decide(f"algorithm.aggregation={aggregation}")
    request = actor_request(
        batch,
        decisions,
        PROXIMAL,
        algorithm=config.algorithm,
        actor=config.actor,
        sampling=config.sampling,
        seed=0,
    )
    terms = ppo_clip(
        torch.tensor(LOG_RATIO, dtype=torch.float64),
        torch.from_numpy(request.advantages),
        clip_low=0.2,
        clip_high=0.2,
    )
    policy = (torch.from_numpy(request.policy_weights) * terms.terms).sum()
    entropy = (torch.from_numpy(request.entropy_weights) * torch.tensor(ENTROPY)).sum()
    (denominator,) = request.mini_batches.denominators
    assert float((policy - 0.01 * entropy) / denominator) == pytest.approx(golden[key], abs=1e-6)


def test_decisions_when_engine_and_trainer_disagree_reject_and_weigh_by_icepop() -> None:
    proximal = PROXIMAL + np.log(np.array([1, 1, 4, 6, 1, 0.4, 1, 1, 1, 1], dtype=np.float32))
    _, decisions = decide(proximal=proximal)
    assert decisions.policy_weights[3] == 0 and decisions.policy_weights[5] == 0, "outside [0.5, 5]"
    assert float(decisions.policy_weights[2]) == pytest.approx(4 / 3), "weight rho x 1 / |o| inside the band"
    assert float(decisions.entropy_weights[3]) == pytest.approx(1 / 2), (
        "entropy is a function of the state alone"
    )
    np.testing.assert_allclose(decisions.advantages, ADVANTAGES, atol=1e-6)


def test_decisions_when_a_proximal_logprob_is_not_finite_reject_that_token_alone() -> None:
    proximal = PROXIMAL.copy()
    proximal[0] = np.nan
    batch, decisions = decide(proximal=proximal)
    assert decisions.policy_weights[0] == 0
    assert decisions.mismatch.counts.num_non_finite == 1
    config = config_with()
    request = actor_request(
        batch,
        decisions,
        proximal,
        algorithm=config.algorithm,
        actor=config.actor,
        sampling=config.sampling,
        seed=0,
    )
    assert np.isfinite(request.proximal_logprobs).all()


def test_decisions_when_tokens_are_stale_give_them_no_say_but_keep_their_values() -> None:
    groups = [
        make_group(0, [4], [1.0], version=5, versions=[5, 5, 6, 6]),
        make_group(1, [3], [-1.0], version=6),
    ]
    batch = build_batch(7, groups, num_critics=2, critic_data="group_split", seed=0)
    stale = batch.versions < token_bound(step=batch.step, max_staleness=1)
    assert stale.tolist() == [True, True, False, False, False, False, False]
    decisions = decide_tokens(
        batch,
        np.array([[0.1] * 7, [0.2, 0.3, 0.5, 0.7, 0.9, 0.2, 0.4]], dtype=np.float32),
        np.full(7, -0.5, dtype=np.float32),
        stale=stale,
        algorithm=config_with(
            "algorithm.advantage_mask_share=0", "algorithm.entropy_filter_share=0"
        ).algorithm,
    )
    assert (decisions.policy_weights[:2] == 0).all() and (decisions.entropy_weights[:2] == 0).all()
    assert (decisions.policy_weights[2:] > 0).all()
    assert float(decisions.advantages[0]) == pytest.approx(1 - 0.15), "its value serves"
    assert bool(decisions.masks.value[:2].all()), "critics train on all tokens by default"


@pytest.mark.report("P34")
def test_decisions_when_every_token_is_rejected_have_nothing_trainable() -> None:
    _, decisions = decide(proximal=PROXIMAL + np.float32(np.log(100)))
    assert not decisions.trainable


@pytest.mark.report("P64")
def test_critics_get_disjoint_halves_of_every_group_that_cover_the_batch() -> None:
    batch = worked_batch()
    first, second = batch.critic_shares
    assert sorted([*first.tolist(), *second.tolist()]) == [0, 1, 2, 3]
    for share in (first, second):
        assert sum(row < 2 for row in share) == 1 and sum(row >= 2 for row in share) == 1


@pytest.mark.parametrize(("critic_data", "sizes"), [("shared", [4, 4]), ("random_split", [2, 2])])
def test_critics_when_data_is_ablated_get_what_the_switch_says(critic_data: str, sizes: list[int]) -> None:
    batch = build_batch(0, worked_groups(), num_critics=2, critic_data=critic_data, seed=0)  # type: ignore[arg-type]
    assert [len(share) for share in batch.critic_shares] == sizes


@pytest.mark.report("P60")
def test_critic_requests_hold_their_own_tokens_monte_carlo_targets_and_token_means() -> None:
    config = config_with()
    batch = worked_batch()
    requests = critic_requests(
        batch,
        values=np.array(VALUES, dtype=np.float32),
        trained=np.ones(10, dtype=np.bool_),
        algorithm=config.algorithm,
        critic=config.critic,
        seed=0,
    )
    for share, request in zip(batch.critic_shares, requests, strict=True):
        lengths = [LENGTHS[row] for row in share]
        assert request.sequences.response_lengths.tolist() == lengths
        expected = [REWARDS[row] for row in share for _ in range(LENGTHS[row])]
        assert request.targets.tolist() == expected
        assert request.mini_batches.denominators.tolist() == [sum(lengths)]


def test_mini_batches_cover_every_response_once_an_epoch_with_their_own_denominators() -> None:
    config = config_with("actor.mini_batches=3", "actor.epochs=2", "algorithm.aggregation=token-mean")
    batch, decisions = decide("algorithm.aggregation=token-mean")
    plan = actor_request(
        batch,
        decisions,
        PROXIMAL,
        algorithm=config.algorithm,
        actor=config.actor,
        sampling=config.sampling,
        seed=3,
    ).mini_batches
    assert plan.sizes.tolist() == [2, 1, 1, 2, 1, 1]
    assert sorted(plan.sequence_indices[:4]) == sorted(plan.sequence_indices[4:]) == [0, 1, 2, 3]
    bounds = np.cumsum([0, *plan.sizes])
    for index, denominator in enumerate(plan.denominators):
        rows = plan.sequence_indices[bounds[index] : bounds[index + 1]]
        assert denominator == sum(LENGTHS[row] for row in rows)


def test_select_sequences_keeps_order_and_tokens() -> None:
    batch = worked_batch()
    rows = np.array([3, 0], dtype=np.int64)
    chosen = select_sequences(batch.sequences, rows)
    assert chosen.response_lengths.tolist() == [1, 3]
    assert chosen.response_token_ids.tolist() == [0, 0, 1, 2]
    assert tokens_of(np.arange(10), batch.lengths, rows).tolist() == [9, 0, 1, 2]
