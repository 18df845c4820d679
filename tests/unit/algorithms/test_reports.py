"""What users of other systems reported about log-probs and ratios, as tests of this library."""

import math

import pytest
import torch

from asyppo_async.algorithms.aggregation import aggregate, denominator, token_weights
from asyppo_async.algorithms.breakdowns import enough_effective_samples, rejection_shares
from asyppo_async.algorithms.composition import policy_coefficients
from asyppo_async.algorithms.logprobs import KeptSet, token_logprobs_and_entropy
from asyppo_async.algorithms.losses import policy_log_ratio, ppo_clip
from asyppo_async.algorithms.metrics import ratio_statistics
from asyppo_async.algorithms.mismatch import SequenceGate, TokenRule, correct_mismatch
from asyppo_async.algorithms.token_classes import classify_tokens, count_classes, token_masks
from asyppo_async.algorithms.weighted_losses import RatioBounds, cispo

F64 = torch.float64
MEAN = "seq-mean-token-mean"
BAND = TokenRule(kind="icepop", low=0.5, high=5.0)
RESPONSE_GATES = [
    SequenceGate(kind="max_log_ratio", high=5.0),
    SequenceGate(kind="geometric", low=0.9, high=1.1),
]


def sampler(logits, temperature, top_k):
    """An engine's processed log-probs, written down plainly: temperature, top-k, renormalise."""
    z = logits / temperature
    if top_k:
        z = z.masked_fill(z < z.topk(top_k, -1).values[:, -1:], -math.inf)
    return torch.log_softmax(z, -1)


@pytest.mark.report("P23")
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("top_k", [0, 5])
def test_ratio_at_lag_zero_when_sampling_is_not_plain_then_one_if_the_trainer_knows_how_it_was_sampled(
    temperature, top_k
):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(200, 6, generator=generator, dtype=F64)
    weight = torch.randn(20, 6, generator=generator, dtype=F64)
    processed = sampler(hidden @ weight.T, temperature, top_k)
    ids = torch.multinomial(processed.exp(), 1, generator=generator).squeeze(1)
    behaviour = processed.gather(1, ids[:, None]).squeeze(1)

    def statistics(assumed_temperature, kept_set):
        proximal = token_logprobs_and_entropy(
            hidden, weight, ids, temperature=assumed_temperature, chunk_tokens=64, kept_set=kept_set
        )
        assert bool(proximal.inside.all())
        return ratio_statistics(proximal.logprobs - behaviour)

    right = statistics(temperature, KeptSet(top_k=top_k, top_p=1.0))
    assert (right.minimum, right.maximum) == pytest.approx((1.0, 1.0), abs=1e-9)
    if temperature != 1.0:
        assert statistics(1.0, KeptSet(top_k=top_k, top_p=1.0)).maximum > 1.2
    if top_k:
        assert statistics(temperature, None).maximum < 1.0


@pytest.mark.report("P25")
def test_mismatch_when_measured_then_lag_zero_is_told_apart_from_older_tokens():
    generator = torch.Generator().manual_seed(0)
    staleness = torch.tensor([0] * 500 + [2] * 500)
    numeric = 0.002 * torch.randn(1000, generator=generator, dtype=F64)
    policy_change = 0.3 * torch.randn(1000, generator=generator, dtype=F64) * (staleness > 0)
    correction = correct_mismatch(
        numeric + policy_change, torch.zeros(1000, dtype=F64), torch.tensor([1000]), rule=BAND
    )
    fresh = ratio_statistics(correction.log_ratio, correction.measured & (staleness == 0))
    stale = ratio_statistics(correction.log_ratio, correction.measured & (staleness > 0))
    mixed = ratio_statistics(correction.log_ratio, correction.measured)
    assert fresh.kl_k3 < 1e-5 and fresh.num_tokens == 500
    assert stale.kl_k3 > 0.02
    # The figure over all tokens would hide that the engine agrees.
    assert mixed.kl_k3 > 1000 * fresh.kl_k3


def step_loss(policy, proximal, behaviour, advantages, lengths, valid):
    """One optimizer step's loss as a worker computes it, from what the coordinator sends."""
    correction = correct_mismatch(
        proximal, behaviour, lengths, rule=BAND, gates=RESPONSE_GATES[:1], valid=valid
    )
    classes = classify_tokens(
        lengths, valid=valid, keep_sequences=correction.keep_sequences, keep_tokens=correction.keep_tokens
    )
    masks = token_masks(classes)
    logs = policy_log_ratio(policy, proximal, masks.policy)
    neutral = torch.where(masks.policy, advantages, torch.zeros_like(advantages))
    terms = ppo_clip(logs, neutral, clip_low=0.2, clip_high=0.2).terms
    weights = token_weights(MEAN, lengths, masks.denominator, dtype=F64)
    weights = weights * policy_coefficients(masks, correction.weights)
    total = denominator(MEAN, lengths, masks.denominator)
    return aggregate(terms, weights, total), classes


@pytest.mark.report("P26")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 800.0, -800.0])
@pytest.mark.parametrize("where", ["proximal", "behaviour", "policy", "advantages"])
def test_loss_when_a_rejected_or_invalid_token_holds_garbage_then_finite_and_exactly_zero_there(bad, where):
    lengths = torch.tensor([3, 2])
    valid = torch.tensor([True, True, True, True, False])
    columns = {name: torch.full((5,), -1.0, dtype=F64) for name in ("policy", "proximal", "behaviour")}
    columns["advantages"] = torch.ones(5, dtype=F64)
    # Token 4 is invalid; token 1 is rejected because its proximal log-prob is not finite.
    columns["proximal"][1] = torch.nan
    for token in (1, 4):
        columns[where][token] = bad if not (where == "proximal" and token == 1) else torch.nan
    policy = columns.pop("policy").requires_grad_()
    loss, classes = step_loss(policy, **columns, lengths=lengths, valid=valid)
    loss.backward()
    assert math.isfinite(loss.item())
    assert policy.grad[[1, 4]].tolist() == [0.0, 0.0]
    assert bool(torch.isfinite(policy.grad).all()) and bool((policy.grad[[0, 2, 3]] != 0).all())
    assert count_classes(classes).rejected_token == 1


@pytest.mark.report("P26")
def test_loss_when_a_ratio_overflows_then_clamped():
    policy = torch.tensor([0.0, 0.0], dtype=torch.float32, requires_grad=True)
    logs = policy_log_ratio(policy, torch.tensor([-800.0, 800.0]))
    terms = cispo(policy, logs, torch.ones(2), bounds=RatioBounds.absolute(1e30)).terms
    terms.sum().backward()
    assert bool(torch.isfinite(policy.grad).all())


@pytest.mark.report("P27")
def test_loss_when_a_response_is_rejected_whole_then_zero_loss_and_gradient_and_it_stays_in_the_mean():
    lengths = torch.tensor([2, 2])
    behaviour = torch.tensor([-1.0, -1.0, -9.0, -1.0], dtype=F64)
    proximal = torch.full((4,), -1.0, dtype=F64)
    policy = torch.full((4,), -0.9, dtype=F64, requires_grad=True)
    advantages = torch.ones(4, dtype=F64)
    valid = torch.ones(4, dtype=torch.bool)
    loss, _ = step_loss(policy, proximal, behaviour, advantages, lengths, valid)
    loss.backward()
    assert policy.grad[2:].tolist() == [0.0, 0.0]
    alone = policy.detach()[:2].clone().requires_grad_()
    single, _ = step_loss(alone, proximal[:2], behaviour[:2], advantages[:2], lengths[:1], valid[:2])
    assert loss.item() == pytest.approx(single.item() / 2)
    everything, _ = step_loss(policy, proximal, torch.full((4,), -9.0, dtype=F64), advantages, lengths, valid)
    assert everything.item() == 0.0


@pytest.mark.report("P27")
@pytest.mark.parametrize("gap", [0.05, -0.05])
def test_masks_when_the_gap_per_token_is_constant_then_what_is_kept_does_not_depend_on_length(gap):
    lengths = torch.tensor([1, 10, 1000, 8000])
    behaviour = torch.full((int(lengths.sum()),), -1.0, dtype=F64)
    kept = correct_mismatch(behaviour + gap, behaviour, lengths, rule=BAND, gates=RESPONSE_GATES)
    assert bool(kept.keep_tokens.all()) and bool(kept.keep_sequences.all())
    product = [SequenceGate(kind="product", low=0.5, high=5.0)]
    by_product = correct_mismatch(behaviour + gap, behaviour, lengths, rule=BAND, gates=product)
    assert by_product.keep_sequences.tolist() == [True, True, False, False]


@pytest.mark.report("P28")
def test_three_policies_when_learning_rate_is_zero_then_only_the_mismatch_ratio_differs_from_one():
    generator = torch.Generator().manual_seed(0)
    proximal = -torch.rand(400, generator=generator, dtype=F64) * 3
    behaviour = proximal + 0.2 * torch.randn(400, generator=generator, dtype=F64)
    policy = proximal.clone().requires_grad_()
    advantages = torch.randn(400, generator=generator, dtype=F64)
    decoupled = ppo_clip(policy_log_ratio(policy, proximal), advantages, clip_low=0.2, clip_high=0.2)
    assert not bool((decoupled.clipped_low | decoupled.clipped_high).any())
    assert torch.equal(decoupled.terms.detach(), -advantages)
    coupled = ppo_clip(policy_log_ratio(policy, behaviour), advantages, clip_low=0.2, clip_high=0.2)
    outside = (coupled.clipped_low | coupled.clipped_high).double().mean()
    assert float(outside) > 0.1
    gap = ratio_statistics(correct_mismatch(proximal, behaviour, torch.tensor([400]), rule=BAND).log_ratio)
    assert gap.kl_k3 > 0.01


@pytest.mark.report("P29")
def test_collapse_signs_when_a_batch_drifts_then_ess_falls_and_rejections_are_told_apart():
    generator = torch.Generator().manual_seed(0)
    staleness = torch.tensor([0] * 300 + [4] * 300)
    advantages = torch.where(torch.arange(600) % 2 == 0, 1.0, -1.0).to(F64)
    drift = torch.where((staleness > 0) & (advantages < 0), 1.5, 0.05).to(F64)
    logs = drift * torch.randn(600, generator=generator, dtype=F64)
    correction = correct_mismatch(logs, torch.zeros(600, dtype=F64), torch.tensor([600]), rule=BAND)
    shares = rejection_shares(~correction.keep_tokens, advantages, staleness, correction.measured)
    assert shares.stale_negative > 0.3
    assert shares.fresh == shares.positive_advantage == 0.0
    calm = ratio_statistics(correction.log_ratio, staleness == 0).effective_sample_size
    wild = ratio_statistics(correction.log_ratio).effective_sample_size
    assert calm > 0.99 and wild < 0.5
    assert enough_effective_samples(calm, 0.5) and not enough_effective_samples(wild, 0.5)


def test_reports_about_ratios_when_listed_then_each_has_a_test():
    answered = {
        mark.args[0]
        for test in globals().values()
        for mark in getattr(test, "pytestmark", [])
        if mark.name == "report"
    }
    assert {"P23", "P25", "P26", "P27", "P28", "P29"} <= answered
