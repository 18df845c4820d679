"""Log-prob of the sampled token, entropy and sum of squared probabilities, from hidden states and the head.

The logits of all tokens together never exist: forward and backward go through the tokens in chunks, and the
backward recomputes a chunk's logits. At 8,000 tokens and a vocabulary of 150,000 the plain computation holds
4.8 GB a tensor.

Legend: `N` tokens, `H` hidden size, `V` vocabulary, `C` tokens of a chunk. z = logits / temperature.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSet:
    """The tokens that top-k and top-p leave, as the engine cuts them: first top-k, then top-p of what is
    left.
    """

    top_k: int
    """0 is off. Ties with the k-th logit are kept."""
    top_p: float
    """1 is off. A token is kept if the tokens above it hold less than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDistribution:
    """What is known of each token's distribution; float32, float64 when the hidden states are."""

    logprobs: Tensor
    """[N] log-prob of the token, with gradient; renormalised over the kept set if there is one."""
    entropies: Tensor
    """[N] entropy of the full distribution at the sampling temperature, with gradient."""
    squared_probabilities: Tensor
    """[N] sum over the vocabulary of pi^2, no gradient: |one_hot - pi|^2 = 1 - 2 pi(a) + this."""
    inside: Tensor
    """[N] bool; false where the token lies outside the kept set. Its log-prob is finite but means nothing, so
    the token gets weight 0.
    """


def token_logprobs_and_entropy(
    hidden: Tensor,
    head_weight: Tensor,
    token_ids: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    float32_head: bool = False,
    kept_set: KeptSet | None = None,
) -> TokenDistribution:
    """log softmax(hidden @ head_weight.T / temperature) at the sampled tokens, chunk by chunk.

    Args:
        hidden: [N, H], row n is the state *before* token n (the response slice of the final norm's output).
        head_weight: [V, H].
        token_ids: [N] int.
        temperature: of the sampling; above 0.
        chunk_tokens: C; peak extra memory is about three [C, V] tensors in float32, six with a kept set.
        float32_head: multiply in float32 although hidden states and weight are of lower precision.
        kept_set: renormalise the log-prob over the tokens that top-k and top-p leave of *this* model's
            distribution, so that it is comparable with an engine's processed log-probs; None for full
            support.
    """
    if temperature <= 0:
        raise ValueError(f"log-probs need a temperature above 0, got {temperature}")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    if hidden.dim() != 2 or len(hidden) != len(token_ids):
        raise ValueError(f"hidden states {list(hidden.shape)} do not belong to {len(token_ids)} tokens")
    if kept_set is not None and (kept_set.top_k < 0 or not 0 < kept_set.top_p <= 1):
        raise ValueError(f"a kept set needs top_k >= 0 and top_p in (0, 1], got {kept_set}")
    if kept_set is not None and kept_set.top_k == 0 and kept_set.top_p == 1:
        kept_set = None
    outputs = _ChunkedHead.apply(  # type: ignore[no-untyped-call]
        hidden,
        head_weight,
        token_ids.long(),
        _Head(temperature=temperature, chunk_tokens=chunk_tokens, float32=float32_head, kept_set=kept_set),
    )
    logprobs, entropies, squares, inside = cast("tuple[Tensor, Tensor, Tensor, Tensor]", outputs)
    return TokenDistribution(
        logprobs=logprobs, entropies=entropies, squared_probabilities=squares, inside=inside
    )


def kept_tokens(z: Tensor, kept_set: KeptSet) -> Tensor:
    """Which tokens of each row are kept, [C, V] bool."""
    kept = torch.ones_like(z, dtype=torch.bool)
    if 0 < kept_set.top_k < z.shape[-1]:
        kept = z >= z.topk(kept_set.top_k, dim=-1).values[:, -1:]
    if kept_set.top_p < 1:
        ordered, index = z.masked_fill(~kept, -torch.inf).sort(dim=-1, descending=True, stable=True)
        probabilities = torch.softmax(ordered, -1)
        above = probabilities.cumsum(-1) - probabilities
        kept = kept & torch.zeros_like(kept).scatter(-1, index, above < kept_set.top_p)
    return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    temperature: float
    chunk_tokens: int
    float32: bool
    kept_set: KeptSet | None

    def scaled_logits(self, hidden: Tensor, head_weight: Tensor) -> Tensor:
        """[C, V] z in float32 or float64."""
        if self.float32 and hidden.dtype != torch.float64:
            hidden, head_weight = hidden.float(), head_weight.float()
        logits = hidden @ head_weight.T
        if logits.dtype != torch.float64:
            logits = logits.float()
        return logits.div_(self.temperature)


class _HeadContext(FunctionCtx):
    """What the forward leaves for the backward, with its types."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    head: _Head


class _ChunkedHead(torch.autograd.Function):
    """Closed forms: d log pi(a) / dz = 1_a - pi and d H / dz = -pi (log pi + H)."""

    @staticmethod
    def forward(
        ctx: _HeadContext, hidden: Tensor, head_weight: Tensor, token_ids: Tensor, head: _Head
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs, entropies, squares, normalisers = (
            torch.empty(len(hidden), dtype=dtype, device=hidden.device) for _ in range(4)
        )
        inside = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)
        for start in range(0, len(hidden), head.chunk_tokens):
            rows = slice(start, start + head.chunk_tokens)
            ids = token_ids[rows].unsqueeze(-1)
            z = head.scaled_logits(hidden[rows], head_weight)
            normalisers[rows] = torch.logsumexp(z, -1)
            z.sub_(normalisers[rows].unsqueeze(-1))
            logprobs[rows] = z.gather(-1, ids).squeeze(-1)
            if head.kept_set is not None:
                kept = kept_tokens(z, head.kept_set)
                logprobs[rows] -= torch.logsumexp(z.masked_fill(~kept, -torch.inf), -1)
                inside[rows] = kept.gather(-1, ids).squeeze(-1)
            probabilities = z.exp()
            squares[rows] = torch.linalg.vecdot(probabilities, probabilities)
            entropies[rows] = -torch.linalg.vecdot(probabilities, z)
        ctx.save_for_backward(hidden, head_weight, token_ids, normalisers, entropies)
        ctx.head = head
        ctx.mark_non_differentiable(squares, inside)
        ctx.set_materialize_grads(False)
        return logprobs, entropies, squares, inside

    @staticmethod
    def backward(ctx: _HeadContext, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, head_weight, token_ids, normalisers, entropies = ctx.saved_tensors
        head, (grad_logprobs, grad_entropies) = ctx.head, grads[:2]
        if grad_logprobs is None and grad_entropies is None:
            return None, None, None, None
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # A sum over many chunks in bfloat16 would lose the small ones.
        grad_weight = (
            torch.zeros_like(head_weight, dtype=normalisers.dtype) if ctx.needs_input_grad[1] else None
        )
        for start in range(0, len(hidden), head.chunk_tokens):
            rows = slice(start, start + head.chunk_tokens)
            z = head.scaled_logits(hidden[rows], head_weight).sub_(normalisers[rows].unsqueeze(-1))
            grad_z = _logits_gradient(
                z,
                token_ids[rows],
                entropies[rows],
                None if grad_logprobs is None else grad_logprobs[rows],
                None if grad_entropies is None else grad_entropies[rows],
                head.kept_set,
            ).div_(head.temperature)
            product_dtype = grad_z.dtype if head.float32 else head_weight.dtype
            grad_logits = grad_z.to(product_dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = (grad_logits @ head_weight.to(product_dtype)).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[rows].to(product_dtype)
        if grad_weight is not None:
            grad_weight = grad_weight.to(head_weight.dtype)
        return grad_hidden, grad_weight, None, None


def _logits_gradient(
    log_pi: Tensor,
    token_ids: Tensor,
    entropies: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropies: Tensor | None,
    kept_set: KeptSet | None,
) -> Tensor:
    """Gradient with respect to z, [C, V]; `log_pi` is overwritten."""
    probabilities = log_pi.exp()
    kept_probabilities = probabilities
    if kept_set is not None and grad_logprobs is not None:
        kept = kept_tokens(log_pi, kept_set)
        kept_probabilities = torch.softmax(log_pi.masked_fill(~kept, -torch.inf), -1)
    if grad_entropies is None:
        grad_z = torch.zeros_like(log_pi)
    else:
        grad_z = log_pi.add_(entropies.unsqueeze(-1)).mul_(probabilities)
        grad_z.mul_(-grad_entropies.unsqueeze(-1))
    if grad_logprobs is not None:
        scale = grad_logprobs.unsqueeze(-1)
        grad_z.sub_(kept_probabilities.mul_(scale))
        grad_z.scatter_add_(-1, token_ids.unsqueeze(-1), scale.to(grad_z.dtype))
    return grad_z
