"""The rows of a step against numbers by hand, on the worked batches of AsyPPO and of three policies."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyppo_async.config.load import config_from_tree
from asyppo_async.config.sections import TrainConfig
from asyppo_async.trainer.coordinator.arithmetic import decide_tokens
from asyppo_async.trainer.coordinator.batch import Batch, batch_of
from asyppo_async.trainer.coordinator.measures.critics import calibration_of, critic_metrics
from asyppo_async.trainer.coordinator.measures.tokens import (
    advantage_metrics,
    advantages_by_position,
    mismatch_metrics,
)
from asyppo_async.trainer.coordinator.measures.updates import update_metrics
from asyppo_async.trainer.coordinator.step import StepResult
from asyppo_async.trainer.worker.messages import OptimizerStep, PartNorms, TrainResult
from asyppo_async.types import Float32Array, Group
from tests.unit.coordinator.worked_batch import ADVANTAGES, VALUES, make_group, worked_groups

BEHAVIOUR = [-1.0, -0.5, -2.0, -0.3, -0.7, -4.0, -0.2]
PROXIMAL = [-1.1, -0.5, -1.2, -0.25, -0.6, -2.0, -0.2]
ENTROPIES = [1.2, 0.5, 0.1, 0.8, 0.3, 2.0, 1.0, 0.2, 0.4, 1.5]


def config_of(*overrides: str) -> TrainConfig:
    return config_from_tree(
        {"preset": "asyppo"}, ["actor.model=a", "critic.model=c", "batch.group_size=2", *overrides]
    )


def result_of(
    config: TrainConfig,
    batch: Batch,
    values: list[list[float]],
    proximal: list[float],
    entropies: list[float],
) -> StepResult:
    """What a step came to in which nobody trained."""
    arrays: list[Float32Array] = [np.array(each, dtype=np.float32) for each in (proximal, entropies)]
    of_critics = np.array(values, dtype=np.float32).reshape(len(values), len(proximal))
    stale = np.zeros(len(proximal), dtype=np.bool_)
    decisions = decide_tokens(
        batch, of_critics, arrays[0], stale=stale, algorithm=config.algorithm, entropies=arrays[1]
    )
    return StepResult(
        batch=batch,
        values_before=None,
        values=of_critics,
        proximal_logprobs=arrays[0],
        proximal_entropies=arrays[1],
        reference_logprobs=None,
        algorithm=config.algorithm,
        decisions=decisions,
        critics=(),
        actor=None,
        actor_clip_norm=1.0,
        critic_clip_norm=1.0,
    )


def asyppo(*overrides: str, values: list[list[float]] = VALUES) -> StepResult:
    config = config_of(*overrides)
    return result_of(config, batch_of(0, worked_groups(), config), values, [-0.5] * 10, ENTROPIES)


def three_policies(*overrides: str) -> StepResult:
    config = config_from_tree(
        {"preset": "grpo"},
        ["actor.model=a", "batch.group_size=2", "algorithm.mismatch=icepop_mask", *overrides],
    )
    groups: list[Group] = [
        make_group(0, [4, 3], [1.0, -1.0], logprobs=BEHAVIOUR, versions=[5, 5, 6, 6, 7, 7, 7])
    ]
    return result_of(config, batch_of(7, groups, config), [], PROXIMAL, [1.0] * 7)


@pytest.mark.report("P61")
def test_critics_of_the_worked_batch_have_the_figures_of_a_hand_calculation() -> None:
    row = critic_metrics(asyppo())
    assert row["critic_0/value_of_right"] == pytest.approx(2.3 / 7)
    assert row["critic_0/value_of_wrong"] == pytest.approx(-0.8 / 3)
    # V(s_0) = .1, -.2, 0, -.1 and p = (V + 1) / 2 against right, wrong, right, wrong.
    assert row["critic_0/start_brier"] == pytest.approx((0.45**2 + 0.4**2 + 0.5**2 + 0.45**2) / 4)
    assert (row["critic_0/start_auc"], row["critic_1/start_auc"]) == (1.0, 0.5)
    # The means of both are .15, -.4, .15, .3.
    assert row["critics/start_brier"] == pytest.approx((0.425**2 + 0.3**2 + 0.425**2 + 0.65**2) / 4)
    assert row["critics/start_auc"] == 0.5
    assert row["critic_0/correlation_with_1"] == pytest.approx(np.corrcoef(VALUES)[0, 1])
    assert row["critic_0/mean_above_1"] == pytest.approx(np.mean(VALUES[0]) - np.mean(VALUES[1]))
    assert row["critic_0/responses"] + row["critic_1/responses"] == 4


def test_masks_of_the_worked_batch_do_not_meet_and_the_filter_takes_what_is_unsure() -> None:
    row = critic_metrics(asyppo())
    assert row["value_std/advantage_masked_share"] == row["value_std/entropy_filtered_share"] == 0.2
    assert row["value_std/both_share"] == 0
    # Filtered are the tokens 7 and 9.
    assert row["value_std/entropy_of_filtered"] == pytest.approx((0.2 + 1.5) / 2)
    assert row["value_std/entropy_of_kept"] == pytest.approx((sum(ENTROPIES) - 1.7) / 8)
    both = critic_metrics(asyppo("algorithm.advantage_mask_share=0.6", "algorithm.entropy_filter_share=0.6"))
    assert both["value_std/both_share"] == pytest.approx(0.2)


def test_explained_variance_by_place_and_length_is_of_the_tokens_there() -> None:
    row = critic_metrics(asyppo())
    returns = np.repeat([1.0, -1.0, 1.0, -1.0], [3, 2, 4, 1])
    first = [0, 3, 5, 9]
    # The first quarter of a response of up to four tokens is its first token.
    error = returns[first] - np.array(VALUES[0])[first]
    expected = 1 - error.var() / returns[first].var()
    assert row["critic_0/explained_variance_quarter_1"] == pytest.approx(expected, rel=1e-6)
    # All responses are short, and no other bucket is named.
    names = [name for name in row if name.startswith("critic_0/explained_variance_to")]
    assert names == ["critic_0/explained_variance_to_64_tokens"]
    whole = returns - np.array(VALUES[0])
    assert row[names[0]] == pytest.approx(1 - whole.var() / returns.var(), rel=1e-6)
    assert row[names[0]] == pytest.approx(row["critic_0/explained_variance_used"])


def test_figures_of_tokens_leave_out_what_is_filtered_or_stale() -> None:
    """The class says where a token counts: of these two it is told how many there are, and nothing else."""
    config = config_of()
    batch = batch_of(0, worked_groups(), config)
    values = np.array(VALUES, dtype=np.float32)
    proximal = np.full(10, -0.5, dtype=np.float32)
    proximal[[2, 9]] = -3.0
    stale = np.arange(10) == 9
    whole = result_of(config, batch, VALUES, proximal.tolist(), ENTROPIES)
    decisions = decide_tokens(
        batch,
        values,
        proximal,
        stale=stale,
        algorithm=config.algorithm,
        filtered=np.array([True, True, False, False]),
    )
    rest = replace(whole, decisions=decisions)
    assert mismatch_metrics(whole)["mismatch/ratio_min"] < 0.1
    assert mismatch_metrics(rest)["mismatch/ratio_min"] == 1.0
    assert mismatch_metrics(rest)["mismatch/gap_mean_staleness_0"] == 0.0
    # Advantages and stds of the second group, tokens 5 to 9, the stale one included.
    second = np.array(ADVANTAGES[5:])
    assert advantage_metrics(rest)["advantage/mean"] == pytest.approx(second.mean(), rel=1e-6)
    assert advantage_metrics(rest)["advantage/std"] == pytest.approx(second.std(), rel=1e-6)
    assert advantages_by_position(rest)[0] == pytest.approx(np.abs(second[[0, 4]]).mean())
    stds = np.abs(values[0] - values[1])[5:] / 2
    assert critic_metrics(rest)["value_std/p50"] == pytest.approx(np.quantile(stds, 0.5), rel=1e-6)


def test_calibration_counts_every_response_once_in_the_tenth_of_its_prediction() -> None:
    off_the_edges = [VALUES[0], [*VALUES[1]]]
    for token, value in ((0, 0.25), (3, -0.5), (5, 0.375), (9, 0.75)):
        off_the_edges[1][token] = value
    found = calibration_of(asyppo(values=off_the_edges))
    # p = (V(s_0) + 1) / 2 of critic 1: .625, .25, .6875, .875.
    assert found["critic_1/calibration_count"] == [0, 0, 1, 0, 0, 0, 2, 0, 1, 0]
    assert found["critic_1/calibration_observed"][6] == 1.0
    assert found["critic_1/calibration_observed"][8] == 0.0
    assert found["critic_1/calibration_predicted"][6] == pytest.approx((0.625 + 0.6875) / 2)


def test_advantages_of_the_worked_batch_by_place_and_their_lambda() -> None:
    result = asyppo()
    row = advantage_metrics(result)
    place = np.concatenate([np.arange(length) / length for length in (3, 2, 4, 1)])
    assert row["advantage/correlation_with_position"] == pytest.approx(
        np.corrcoef(place, ADVANTAGES)[0, 1], rel=1e-5
    )
    assert row["advantage/lambda_min"] == row["advantage/lambda_max"] == 1.0
    deciles = advantages_by_position(result)
    assert len(deciles) == 10
    assert deciles[0] == pytest.approx(np.abs(np.array(ADVANTAGES)[[0, 3, 5, 9]]).mean())
    adaptive = advantage_metrics(asyppo("algorithm.lambda_actor=adaptive"))
    # 1 - 1 / (1.5 T) for T = 1 and T = 4.
    assert adaptive["advantage/lambda_min"] == pytest.approx(1 / 3)
    assert adaptive["advantage/lambda_max"] == pytest.approx(1 - 1 / 6)
    assert "advantage/lambda_min" not in advantage_metrics(three_policies())


def test_mismatch_of_three_policies_is_golden_and_told_apart_by_age(golden: dict[str, Any]) -> None:
    row = mismatch_metrics(three_policies("algorithm.mismatch_high=5", "algorithm.mismatch_low=0.5"))
    measured = {
        "effective_sample_size": "ess",
        "chi_square": "chi2",
        "kl_k1": "k1_mu_old",
        "kl_k3": "k3_mu_old",
        "perplexity_ratio": "ppl_ratio",
    }
    for name, key in measured.items():
        assert row[f"mismatch/{name}"] == pytest.approx(golden[key], rel=1e-5), name
    # Version 7 is the trainer's: the second response is fresh, the first is not.
    assert row["mismatch_fresh/ratio_max"] == pytest.approx(np.exp(2.0), rel=1e-5)
    assert row["mismatch_older/ratio_max"] == pytest.approx(np.exp(0.8), rel=1e-5)
    assert row["mismatch_older/kl_k1"] == pytest.approx(-0.75 / 4, rel=1e-5)
    assert row["mismatch/rejected_share_fresh"] == pytest.approx(1 / 3)
    assert row["mismatch/rejected_share_older"] == 0
    assert row["mismatch/rejected_share_negative"] == pytest.approx(1 / 3)


def test_rejected_responses_are_counted_by_cause_and_length() -> None:
    gates = "algorithm.sequence_gates=" + str(
        [{"kind": "max_ratio", "high": 5.0}, {"kind": "product", "low": 0.5, "high": 5.0}]
    ).replace("'", '"').replace('"kind": ', "kind=").replace('"high": ', "high=").replace('"low": ', "low=")
    row = mismatch_metrics(three_policies(gates))
    # Both reject the second response, whose ratios are 1.105, 7.389 and 1: it is counted under each, and once.
    assert row["mismatch/rejected_by_max_ratio_responses"] == 1
    assert row["mismatch/rejected_by_product_responses"] == 1
    assert row["mismatch/rejected_responses"] == 1
    assert row["mismatch/rejected_responses_share_to_64_tokens"] == 0.5
    # What either reading of MIS would veto is told for both: 7.389 > 5, but |log 7.389| = 2 < 5.
    assert row["mismatch/veto_share_ratio_to_64_tokens"] == 0.5
    assert row["mismatch/veto_share_log_to_64_tokens"] == 0.0
    assert not any("veto" in name for name in mismatch_metrics(three_policies()))
    opsm = mismatch_metrics(three_policies("algorithm.opsm_threshold=0.000001"))
    assert opsm["mismatch/rejected_by_opsm_responses"] == opsm["mismatch/rejected_responses"]


def test_norms_of_a_critics_parts_are_means_of_gradients_and_the_last_weights() -> None:
    def step(head: float, weights: float) -> OptimizerStep:
        return OptimizerStep(
            loss=1.0,
            grad_norm=head,
            learning_rate=1e-3,
            skipped=False,
            num_tokens=3,
            entropy=float("nan"),
            clip_fraction_low=0.0,
            clip_fraction_high=0.0,
            ratio_mean=1.0,
            ratio_max=1.0,
            kl_proximal=0.0,
            parts=PartNorms(
                head_gradient=head, backbone_gradient=1.5, head_weights=weights, backbone_weights=8.0
            ),
        )

    update = TrainResult(steps=(step(45.0, 0.5), step(5.0, 0.75)), compute_s=1.0)
    row = update_metrics("critic_1", update, clip_norm=10.0)
    assert (row["critic_1/head_grad_norm"], row["critic_1/backbone_grad_norm"]) == (25.0, 1.5)
    assert (row["critic_1/head_norm"], row["critic_1/backbone_norm"]) == (0.75, 8.0)
    assert "actor/head_norm" not in update_metrics("actor", update, clip_norm=10.0)
