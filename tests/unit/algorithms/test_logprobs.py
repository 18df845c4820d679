import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from asyppo_async.algorithms.logprobs import KeptSet, kept_tokens, token_logprobs_and_entropy

F64 = torch.float64


class LargestTensor(TorchDispatchMode):
    """Remembers the largest number of elements that any operation made."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for out in result if isinstance(result, tuple | list) else (result,):
            if isinstance(out, torch.Tensor):
                self.elements = max(self.elements, out.numel())
        return result


def problem(n=23, h=8, v=37, dtype=F64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, h, generator=generator, dtype=F64).to(dtype).requires_grad_()
    weight = torch.randn(v, h, generator=generator, dtype=F64).to(dtype).requires_grad_()
    ids = torch.randint(0, v, (n,), generator=generator)
    cotangents = torch.randn(2, n, generator=generator, dtype=F64)
    return hidden, weight, ids, cotangents


def plain(hidden, weight, ids, temperature):
    logs = torch.log_softmax(hidden @ weight.T / temperature, -1)
    logprobs = logs.gather(-1, ids[:, None])[:, 0]
    return logprobs, -(logs.exp() * logs).sum(-1), logs.exp().square().sum(-1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 23, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunked_head_when_compared_with_plain_then_equal_with_gradients(
    dtype, tolerance, chunk_tokens, temperature
):
    hidden, weight, ids, (a, b) = problem(dtype=dtype)
    result = token_logprobs_and_entropy(
        hidden, weight, ids, temperature=temperature, chunk_tokens=chunk_tokens
    )
    ours = torch.autograd.grad((result.logprobs * a + result.entropies * b).sum(), (hidden, weight))
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logprobs, entropies, squares = plain(exact_hidden, exact_weight, ids, temperature)
    theirs = torch.autograd.grad((logprobs * a + entropies * b).sum(), (exact_hidden, exact_weight))
    pairs = [(result.logprobs, logprobs), (result.entropies, entropies)]
    pairs += [(result.squared_probabilities, squares), *zip(ours, theirs, strict=True)]
    for mine, wanted in pairs:
        torch.testing.assert_close(mine.double(), wanted, rtol=tolerance, atol=tolerance)


def test_chunked_head_when_differentiated_then_gradcheck():
    hidden, weight, ids, _ = problem(n=4, h=3, v=5)

    def outputs(h, w):
        result = token_logprobs_and_entropy(h, w, ids, temperature=0.7, chunk_tokens=3)
        return result.logprobs, result.entropies

    assert torch.autograd.gradcheck(outputs, (hidden, weight))


def test_chunked_head_when_run_then_no_tensor_is_larger_than_a_chunk_of_logits():
    n, v, chunk = 64, 512, 4
    hidden, weight, ids, _ = problem(n=n, v=v, dtype=torch.float32)
    with LargestTensor() as largest:
        result = token_logprobs_and_entropy(hidden, weight, ids, temperature=1.0, chunk_tokens=chunk)
        (result.logprobs + result.entropies).sum().backward()
    assert largest.elements == weight.numel()
    assert largest.elements < n * v and chunk * v < weight.numel()


def test_chunked_head_when_one_output_is_used_then_gradient_is_of_that_one():
    hidden, weight, ids, _ = problem()
    for index in (0, 1):
        result = token_logprobs_and_entropy(hidden, weight, ids, temperature=1.0, chunk_tokens=7)
        ours = torch.autograd.grad((result.logprobs, result.entropies)[index].sum(), (hidden, weight))
        theirs = torch.autograd.grad(plain(hidden, weight, ids, 1.0)[index].sum(), (hidden, weight))
        for mine, wanted in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, wanted)


def test_chunked_head_when_there_are_no_tokens_then_empty_and_zero_gradient():
    hidden, weight, ids, _ = problem(n=0)
    result = token_logprobs_and_entropy(hidden, weight, ids, temperature=1.0, chunk_tokens=7)
    (result.logprobs.sum() + result.entropies.sum()).backward()
    assert float(weight.grad.abs().sum()) == 0.0


def test_squared_probabilities_when_combined_then_norm_of_one_hot_minus_pi():
    hidden, weight, ids, _ = problem()
    result = token_logprobs_and_entropy(hidden, weight, ids, temperature=1.0, chunk_tokens=7)
    pi = torch.softmax(hidden @ weight.T, -1)
    direct = (torch.nn.functional.one_hot(ids, weight.shape[0]) - pi).square().sum(-1)
    torch.testing.assert_close(1 - 2 * result.logprobs.exp() + result.squared_probabilities, direct)


@pytest.mark.parametrize(("temperature", "chunk"), [(0.0, 4), (1.0, 0)])
def test_chunked_head_when_setting_is_out_of_range_then_says_so(temperature, chunk):
    hidden, weight, ids, _ = problem()
    with pytest.raises(ValueError, match="got 0"):
        token_logprobs_and_entropy(hidden, weight, ids, temperature=temperature, chunk_tokens=chunk)


SUPPORT = [2.0, 1.0, 0.0, -1.0]


def scored(ids, temperature, kept_set):
    """The logits are SUPPORT at every token."""
    hidden = torch.ones(len(ids), 1, dtype=F64)
    weight = torch.tensor(SUPPORT, dtype=F64).unsqueeze(1)
    return token_logprobs_and_entropy(
        hidden, weight, torch.tensor(ids), temperature=temperature, chunk_tokens=3, kept_set=kept_set
    )


def test_kept_set_when_top_two_then_golden_processed_probabilities(golden, check):
    support = golden["support"]
    full = scored([0, 1, 2, 3], 0.99, None)
    check(full.logprobs.exp(), support["temp"])
    raw = scored([0, 1, 2, 3], 1.0, None)
    check(raw.logprobs.exp(), support["raw"])
    check((full.logprobs - raw.logprobs).exp(), support["rho_raw_mu"])
    kept = scored([0, 1, 2], 0.99, KeptSet(top_k=2, top_p=1.0))
    check(kept.logprobs[:2].exp(), support["processed_top2"])
    assert kept.inside.tolist() == [True, True, False]
    assert bool(torch.isfinite(kept.logprobs).all())
    check((full.logprobs[:2] - kept.logprobs[:2]).exp(), support["rho_old_full_over_mu_proc(tok0,1)"])


@pytest.mark.parametrize(
    ("top_k", "top_p", "expected"),
    [
        (0, 1.0, [True, True, True, True]),
        (3, 1.0, [True, True, True, False]),
        (0, 0.6, [True, False, False, False]),
        (0, 0.7, [True, True, False, False]),
        (0, 1e-9, [True, False, False, False]),
        # Of the two that top-k leaves the first holds .731, so .7 keeps one and .8 both.
        (2, 0.7, [True, False, False, False]),
        (2, 0.8, [True, True, False, False]),
    ],
)
def test_kept_set_when_bounds_vary_then_top_k_first_and_top_p_of_the_rest(top_k, top_p, expected):
    z = torch.tensor([SUPPORT], dtype=F64)
    assert kept_tokens(z, KeptSet(top_k=top_k, top_p=top_p)).tolist() == [expected]
    assert kept_tokens(z.flip(1), KeptSet(top_k=top_k, top_p=top_p)).tolist() == [expected[::-1]]


def test_kept_set_when_differentiated_then_gradcheck_and_full_entropy():
    hidden, weight, ids, _ = problem(n=5, h=3, v=6)
    kept_set = KeptSet(top_k=4, top_p=0.9)

    def outputs(h, w):
        result = token_logprobs_and_entropy(h, w, ids, temperature=0.7, chunk_tokens=2, kept_set=kept_set)
        return result.logprobs, result.entropies

    assert torch.autograd.gradcheck(outputs, (hidden, weight))
    torch.testing.assert_close(outputs(hidden, weight)[1], plain(hidden, weight, ids, 0.7)[1])


def test_kept_set_when_out_of_range_then_says_so():
    with pytest.raises(ValueError, match="top_p in"):
        scored([0], 1.0, KeptSet(top_k=0, top_p=0.0))


def test_float32_head_when_body_is_bfloat16_then_closer_to_exact_than_a_bfloat16_head():
    hidden, weight, ids, _ = problem(n=64, h=64, v=200, dtype=torch.bfloat16)
    exact = plain(hidden.double(), weight.double(), ids, 1.0)[0]
    errors = []
    for float32_head in (True, False):
        result = token_logprobs_and_entropy(
            hidden, weight, ids, temperature=1.0, chunk_tokens=16, float32_head=float32_head
        )
        errors.append(float((result.logprobs.double() - exact).abs().mean().detach()))
        (result.logprobs.sum() + result.entropies.sum()).backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    assert errors[0] < 1e-4 < errors[1]
