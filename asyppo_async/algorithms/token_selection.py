"""Which tokens the advantage mask and the entropy filter take out: AsyPPO's choice and its ablations.

Legend: `B` responses, `T` packed tokens.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyppo_async.algorithms.critics import all_equal, select_highest, select_lowest
from asyppo_async.algorithms.packed import count_true
from asyppo_async.algorithms.seeded import seeded_integer

SelectBy = Literal["value_std", "entropy", "random", "none"]
SelectionEnd = Literal["lowest", "highest"]
SelectionScope = Literal["batch", "sequence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSelection:
    """The tokens that are taken out."""

    selected: Tensor
    """[T] bool."""
    count: int
    degenerate: bool
    """All scores were equal, so nothing was selected."""


def random_scores(num_tokens: int, *, seed: int, step: int, purpose: str) -> Tensor:
    """Uniform scores in float64, [T]; the same for the same seed, step and purpose on every machine."""
    generator = torch.Generator().manual_seed(seeded_integer(seed, step, purpose) >> 1)
    return torch.rand(num_tokens, generator=generator, dtype=torch.float64)


def select_tokens(
    scores: Tensor | None,
    share: float,
    end: SelectionEnd,
    *,
    valid: Tensor | None = None,
    scope: SelectionScope = "batch",
    lengths: Tensor | None = None,
) -> TokenSelection:
    """Take out exactly floor(share * N) of the N valid tokens by score, ties in flat order.

    AsyPPO masks advantages with the value std as score at the lowest end and filters entropy at the highest.
    The same function with entropies, `random_scores` or None (select nothing) gives the ablations the same
    counts and ties.

    Args:
        scores: [T], or None to select nothing (then `valid` is needed).
        share: in [0, 1].
        end: which end of the scores goes.
        valid: [T] bool.
        scope: "batch" ranks all tokens together (the paper); "sequence" each response by itself, floor(share
            * |o_i|)
            tokens of it.
        lengths: [B], for "sequence".
    """
    if scores is None:
        if valid is None:
            raise ValueError(
                "a selection of nothing needs valid to know the number of tokens, got None for both"
            )
        return TokenSelection(selected=torch.zeros_like(valid), count=0, degenerate=False)
    everything = torch.ones_like(scores, dtype=torch.bool) if valid is None else valid
    if all_equal(scores if bool(everything.all()) else scores[everything]):
        return TokenSelection(selected=torch.zeros_like(everything), count=0, degenerate=True)
    select = select_lowest if end == "lowest" else select_highest
    if scope == "batch":
        selected = select(scores, share, everything)
    elif lengths is None:
        raise ValueError("a selection per sequence needs lengths, got None")
    else:
        parts = zip(
            torch.split(scores, lengths.tolist()), torch.split(everything, lengths.tolist()), strict=True
        )
        selected = torch.cat([select(part, share, mask) for part, mask in parts])
    return TokenSelection(selected=selected, count=count_true(selected), degenerate=False)


def choose_scores(
    select_by: SelectBy,
    *,
    value_std: Tensor,
    entropies: Tensor | None = None,
    seed: int = 0,
    step: int = 0,
    purpose: str = "",
) -> Tensor | None:
    """The scores that a setting means, for `select_tokens`.

    Args:
        select_by: see `select_tokens`.
        value_std: [T].
        entropies: [T], for "entropy".
        seed: of the run, for "random".
        step: training step, for "random".
        purpose: "advantage" or "entropy", so that two random selections are independent.
    """
    if select_by == "value_std":
        return value_std
    if select_by == "entropy":
        if entropies is None:
            raise ValueError("a selection by entropy needs entropies, got None")
        return entropies
    if select_by == "random":
        return random_scores(len(value_std), seed=seed, step=step, purpose=purpose)
    if select_by == "none":
        return None
    raise ValueError(f"tokens are selected by value_std, entropy, random or none; got {select_by!r}")
