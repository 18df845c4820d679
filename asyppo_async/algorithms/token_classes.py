"""Every token has one class, and the class says where the token counts.

    class              policy gradient   entropy   value loss   GAE   std ranking   denominator        metrics
    trained            yes               yes       yes          yes   yes           yes                yes
    rejected_token     0                 yes       gate         yes   yes           unless renormalise yes
    rejected_sequence  0                 no        gate         yes   yes           unless renormalise yes
    stale              0                 no        gate         yes   yes           unless renormalise counted
    filtered           no                no        gate         no    no            no                 counted
    invalid            no                no        no           no    no            no                 no

"gate" is `critic_trains_on`: all | kept. Legend: `B` responses, `T` packed tokens.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import torch
from torch import Tensor

from asyppo_async.algorithms.packed import check_lengths, spread

CriticTrainsOn = Literal["all", "kept"]


class TokenClass(IntEnum):
    """Where a token stands. The value is what a packed [T] uint8 tensor of classes holds."""

    INVALID = 0
    """Padding, observation text, a dropped response."""
    TRAINED = 1
    REJECTED_TOKEN = 2
    """By a token rule of the mismatch correction (IcePoP, not finite)."""
    REJECTED_SEQUENCE = 3
    """With its whole response, by a sequence gate (MIS, OPSM)."""
    STALE = 4
    """Older than the bound, under `on_stale = mask`."""
    FILTERED = 5
    """Of a group that is all right or all wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMasks:
    """One [T] bool mask per column of the table."""

    policy: Tensor
    entropy: Tensor
    value: Tensor
    advantage: Tensor
    """GAE, returns and value statistics."""
    ranking: Tensor
    denominator: Tensor
    responses: Tensor
    """What makes a response count in sequence means: as `denominator`, but never renormalised."""
    measured: Tensor
    """What enters the metrics of ratio and mismatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenClassCounts:
    """Number of tokens in each class."""

    invalid: int
    trained: int
    rejected_token: int
    rejected_sequence: int
    stale: int
    filtered: int


def classify_tokens(
    lengths: Tensor,
    *,
    valid: Tensor | None = None,
    filtered_responses: Tensor | None = None,
    stale: Tensor | None = None,
    keep_sequences: Tensor | None = None,
    keep_tokens: Tensor | None = None,
) -> Tensor:
    """Give each token its class, [T] uint8. The first that applies: invalid, filtered, stale, rejected with
    its response, rejected alone, trained.

    Args:
        lengths: [B].
        valid: [T] bool, false for what the policy did not emit and for dropped responses.
        filtered_responses: [B] bool.
        stale: [T] bool.
        keep_sequences: [B] bool, from the mismatch correction.
        keep_tokens: [T] bool, from the mismatch correction.
    """
    num_tokens = int(lengths.sum())
    classes = torch.full((num_tokens,), int(TokenClass.TRAINED), dtype=torch.uint8)
    for marked, token_class in (
        (None if keep_tokens is None else ~keep_tokens, TokenClass.REJECTED_TOKEN),
        (None if keep_sequences is None else spread(~keep_sequences, lengths), TokenClass.REJECTED_SEQUENCE),
        (stale, TokenClass.STALE),
        (None if filtered_responses is None else spread(filtered_responses, lengths), TokenClass.FILTERED),
        (None if valid is None else ~valid, TokenClass.INVALID),
    ):
        if marked is not None:
            check_lengths(lengths, len(marked))
            classes.masked_fill_(marked, int(token_class))
    return classes


def token_masks(
    classes: Tensor, *, critic_trains_on: CriticTrainsOn = "all", renormalise: bool = False
) -> TokenMasks:
    """The masks that the classes mean.

    Args:
        classes: [T] uint8 of `TokenClass`.
        critic_trains_on: whether the value loss includes filtered, rejected and stale tokens.
        renormalise: divide by kept tokens only (XTuner) instead of by all (AReaL, slime; the default).
    """
    if critic_trains_on not in ("all", "kept"):
        raise ValueError(f"critic_trains_on is 'all' or 'kept', got {critic_trains_on!r}")
    trained = classes == TokenClass.TRAINED
    valid = classes != TokenClass.INVALID
    unfiltered = valid & (classes != TokenClass.FILTERED)
    return TokenMasks(
        policy=trained,
        entropy=trained | (classes == TokenClass.REJECTED_TOKEN),
        value=valid if critic_trains_on == "all" else trained,
        advantage=unfiltered,
        ranking=unfiltered,
        denominator=trained if renormalise else unfiltered,
        responses=unfiltered,
        measured=unfiltered & (classes != TokenClass.STALE),
    )


def count_classes(classes: Tensor) -> TokenClassCounts:
    """Tokens in each class; the sum is `T`."""
    counts = torch.bincount(classes.long(), minlength=len(TokenClass)).tolist()
    return TokenClassCounts(
        invalid=counts[TokenClass.INVALID],
        trained=counts[TokenClass.TRAINED],
        rejected_token=counts[TokenClass.REJECTED_TOKEN],
        rejected_sequence=counts[TokenClass.REJECTED_SEQUENCE],
        stale=counts[TokenClass.STALE],
        filtered=counts[TokenClass.FILTERED],
    )
