"""One S3AC step on a tiny recurrent model, against the closed form of its gradient."""

import torch
from torch import nn

from asyppo_async.algorithms.advantages import gae, length_adaptive_lambda, value_targets
from asyppo_async.algorithms.aggregation import aggregate, denominator, token_weights
from asyppo_async.algorithms.alignment import response_rows, response_token_positions, start_rows
from asyppo_async.algorithms.composition import policy_coefficients
from asyppo_async.algorithms.critics import value_loss
from asyppo_async.algorithms.logprobs import token_logprobs_and_entropy
from asyppo_async.algorithms.losses import policy_log_ratio
from asyppo_async.algorithms.mismatch import SequenceGate, TokenRule, correct_mismatch
from asyppo_async.algorithms.token_classes import classify_tokens, token_masks
from asyppo_async.algorithms.weighted_losses import RatioBounds, cispo

F64 = torch.float64
PROMPTS, RESPONSES = torch.tensor([2, 3, 1]), torch.tensor([4, 2, 3])
REWARDS = torch.tensor([1.0, -1.0, 1.0], dtype=F64)
VOCABULARY, HIDDEN = 8, 6


class TinyModel(nn.Module):
    """Hidden states depend on the whole prefix: a decayed sum of embeddings through one layer."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.embedding = nn.Parameter(torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=F64))
        self.layer = nn.Parameter(torch.randn(HIDDEN, HIDDEN, generator=generator, dtype=F64) / 3)
        self.head = nn.Parameter(torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=F64))
        self.value = nn.Parameter(torch.randn(HIDDEN, generator=generator, dtype=F64) / (HIDDEN + 1))

    def forward(self, ids, sequence_lengths):
        rows = []
        for part in ids.split(sequence_lengths.tolist()):
            state = torch.zeros(HIDDEN, dtype=F64)
            for token in part:
                state = 0.5 * state + self.embedding[token]
                rows.append(torch.tanh(state @ self.layer))
        return torch.stack(rows)


def forward(model, ids):
    hidden = model(ids, PROMPTS + RESPONSES)
    rows = response_rows(PROMPTS, RESPONSES)
    tokens = ids[response_token_positions(PROMPTS, RESPONSES)]
    scored = token_logprobs_and_entropy(hidden[rows], model.head, tokens, temperature=1.0, chunk_tokens=4)
    return scored.logprobs, hidden[rows] @ model.value, hidden[start_rows(PROMPTS, RESPONSES)] @ model.value


def test_s3ac_step_when_first_mini_batch_then_gradient_is_the_closed_form():
    model = TinyModel()
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCABULARY, (int((PROMPTS + RESPONSES).sum()),), generator=generator)
    policy, values, start_values = forward(model, ids)
    proximal = policy.detach()
    starts = RESPONSES.cumsum(0) - RESPONSES
    torch.testing.assert_close(values[starts], start_values)
    shift = torch.tensor([0.1, -2.0, 0.0, 0.2, 0.0, -0.1, 0.3, 6.0, 0.1], dtype=F64)
    rule = TokenRule(kind="icepop_mask", low=0.5, high=5.0)
    gates = [SequenceGate(kind="max_log_ratio", high=5.0)]
    correction = correct_mismatch(proximal, proximal - shift, RESPONSES, rule=rule, gates=gates)
    classes = classify_tokens(
        RESPONSES, keep_sequences=correction.keep_sequences, keep_tokens=correction.keep_tokens
    )
    masks = token_masks(classes)
    advantages = gae(REWARDS, values, RESPONSES, length_adaptive_lambda(RESPONSES, 1.5))
    terms = cispo(
        policy, policy_log_ratio(policy, proximal), advantages, bounds=RatioBounds.relative(0.2, 0.28)
    ).terms
    weights = token_weights("token-mean", RESPONSES, masks.denominator, dtype=F64)
    weights = weights * policy_coefficients(masks, correction.weights)
    loss = aggregate(terms, weights, denominator("token-mean", RESPONSES, masks.denominator))
    names = ["embedding", "layer", "head"]
    parameters = [getattr(model, name) for name in names]
    ours = torch.autograd.grad(loss, parameters, retain_graph=True)
    # r = 1: the gradient is -(1/9) sum of A_t grad log pi_t over kept tokens. Token 1 is outside the band, the third
    # response holds a log ratio of 6 and is vetoed.
    kept = [0, 2, 3, 4, 5]
    closed = -sum(advantages[t] * policy[t] for t in kept) / 9
    for mine, wanted in zip(ours, torch.autograd.grad(closed, parameters), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-13)


def test_s3ac_critic_when_trained_a_step_then_gradient_of_the_head_is_error_times_hidden():
    model = TinyModel()
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCABULARY, (int((PROMPTS + RESPONSES).sum()),), generator=generator)
    _, values, _ = forward(model, ids)
    targets = value_targets(REWARDS, values, RESPONSES, 1.0)
    terms = value_loss(values, targets, clip=0.2, old_values=values)
    weights = token_weights("token-mean", RESPONSES, dtype=F64)
    loss = aggregate(terms, weights, denominator("token-mean", RESPONSES))
    (gradient,) = torch.autograd.grad(loss, model.value, retain_graph=True)
    hidden = model(ids, PROMPTS + RESPONSES)[response_rows(PROMPTS, RESPONSES)]
    errors = (values - targets).detach()
    torch.testing.assert_close(gradient, (errors.unsqueeze(1) * hidden).sum(0) / 9)
