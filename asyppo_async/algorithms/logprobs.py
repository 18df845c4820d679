"""Log-prob of the sampled token, entropy and sum of squared probabilities, from hidden states and the head's
weight.

The logits of all tokens together never exist: forward and backward go through the tokens in chunks, and the
backward recomputes a chunk's logits. At 8,000 tokens and a vocabulary of 150,000 the plain computation holds
4.8 GB a tensor.

Legend: `N` tokens, `H` hidden size, `V` vocabulary, `C` tokens of a chunk.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDistribution:
    """What is known of each token's distribution; float32, float64 when the hidden states are."""

    logprobs: Tensor
    """[N] log-prob of the token, with gradient."""
    entropies: Tensor
    """[N] entropy of the full distribution at the sampling temperature, with gradient."""
    squared_probabilities: Tensor
    """[N] sum over the vocabulary of pi^2, no gradient: |one_hot - pi|^2 = 1 - 2 pi(a) + this."""


def token_logprobs_and_entropy(
    hidden: Tensor,
    head_weight: Tensor,
    token_ids: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    float32_head: bool = False,
) -> TokenDistribution:
    """log softmax(hidden @ head_weight.T / temperature) at the sampled tokens, chunk by chunk.

    Args:
        hidden: [N, H], row n is the state *before* token n (the response slice of the final norm's output).
        head_weight: [V, H].
        token_ids: [N] int.
        temperature: of the sampling; above 0.
        chunk_tokens: C; peak extra memory is about three [C, V] tensors in float32.
        float32_head: multiply in float32 although hidden states and weight are of lower precision.
    """
    if temperature <= 0:
        raise ValueError(f"log-probs need a temperature above 0, got {temperature}")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    if hidden.dim() != 2 or len(hidden) != len(token_ids):
        raise ValueError(f"hidden states {list(hidden.shape)} do not belong to {len(token_ids)} tokens")
    outputs = _ChunkedHead.apply(  # type: ignore[no-untyped-call]
        hidden, head_weight, token_ids.long(), float(temperature), int(chunk_tokens), bool(float32_head)
    )
    logprobs, entropies, squares = cast("tuple[Tensor, Tensor, Tensor]", outputs)
    return TokenDistribution(logprobs=logprobs, entropies=entropies, squared_probabilities=squares)


def _scaled_logits(hidden: Tensor, head_weight: Tensor, temperature: float, *, float32_head: bool) -> Tensor:
    """[C, V] logits / temperature in float32 or float64."""
    if float32_head and hidden.dtype != torch.float64:
        hidden, head_weight = hidden.float(), head_weight.float()
    logits = hidden @ head_weight.T
    if logits.dtype != torch.float64:
        logits = logits.float()
    return logits.div_(temperature)


class _HeadContext(FunctionCtx):
    """What the forward leaves for the backward, with its types."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    temperature: float
    chunk_tokens: int
    float32_head: bool


class _ChunkedHead(torch.autograd.Function):
    """Closed forms: d log pi(a) / dz = 1_a - pi and d H / dz = -pi (log pi + H), with z = logits /
    temperature.
    """

    @staticmethod
    def forward(
        ctx: _HeadContext,
        hidden: Tensor,
        head_weight: Tensor,
        token_ids: Tensor,
        temperature: float,
        chunk_tokens: int,
        float32_head: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs, entropies, squares, normalisers = (
            torch.empty(len(hidden), dtype=dtype, device=hidden.device) for _ in range(4)
        )
        for start in range(0, len(hidden), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            z = _scaled_logits(hidden[rows], head_weight, temperature, float32_head=float32_head)
            normaliser = torch.logsumexp(z, -1)
            z.sub_(normaliser.unsqueeze(-1))
            logprobs[rows] = z.gather(-1, token_ids[rows].unsqueeze(-1)).squeeze(-1)
            probabilities = z.exp()
            squares[rows] = torch.linalg.vecdot(probabilities, probabilities)
            entropies[rows] = -torch.linalg.vecdot(probabilities, z)
            normalisers[rows] = normaliser
        ctx.save_for_backward(hidden, head_weight, token_ids, normalisers, entropies)
        ctx.temperature, ctx.chunk_tokens, ctx.float32_head = temperature, chunk_tokens, float32_head
        ctx.mark_non_differentiable(squares)
        ctx.set_materialize_grads(False)
        return logprobs, entropies, squares

    @staticmethod
    def backward(
        ctx: _HeadContext, *grads: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, head_weight, token_ids, normalisers, entropies = ctx.saved_tensors
        grad_logprobs, grad_entropies = grads[0], grads[1]
        needs_hidden, needs_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        if grad_logprobs is None and grad_entropies is None:
            return None, None, None, None, None, None
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # A sum over many chunks in bfloat16 would lose the small ones.
        grad_weight = torch.zeros_like(head_weight, dtype=normalisers.dtype) if needs_weight else None
        for start in range(0, len(hidden), ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            z = _scaled_logits(hidden[rows], head_weight, ctx.temperature, float32_head=ctx.float32_head)
            z.sub_(normalisers[rows].unsqueeze(-1))
            probabilities = z.exp()
            if grad_entropies is None:
                grad_z = torch.zeros_like(z)
            else:
                z.add_(entropies[rows].unsqueeze(-1)).mul_(probabilities)
                grad_z = z.mul_(-grad_entropies[rows].unsqueeze(-1))
            if grad_logprobs is not None:
                scale = grad_logprobs[rows].unsqueeze(-1)
                grad_z.sub_(probabilities.mul_(scale))
                grad_z.scatter_add_(-1, token_ids[rows].unsqueeze(-1), scale.to(grad_z.dtype))
            grad_z.div_(ctx.temperature)
            product_dtype = grad_z.dtype if ctx.float32_head else head_weight.dtype
            if grad_hidden is not None:
                grad_hidden[rows] = (grad_z.to(product_dtype) @ head_weight.to(product_dtype)).to(
                    hidden.dtype
                )
            if grad_weight is not None:
                grad_weight += grad_z.to(product_dtype).T @ hidden[rows].to(product_dtype)
        if grad_weight is not None:
            grad_weight = grad_weight.to(head_weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None
