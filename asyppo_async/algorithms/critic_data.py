"""Which critic learns from which response, and which critics may speak about it.

Legend: `M` critics, `B` responses, `T` packed tokens.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from asyppo_async.algorithms.critics import ValueAggregation, ensemble_value, split_groups
from asyppo_async.algorithms.packed import check_lengths, compute_dtype

CriticData = Literal["group_split", "random_split", "shared"]
SmallGroups = Literal["rotate", "all"]
AdvantageValues = Literal["post", "pre", "crossfit"]


def random_split(
    prompt_ids: Sequence[str],
    draw_ids: Sequence[int],
    sample_indices: Sequence[int],
    *,
    num_critics: int,
    seed: int,
    step: int,
) -> Tensor:
    """Split the responses of the batch evenly with no regard to their groups, [B] int64 (an ablation).

    All responses are ordered by hash and dealt out in turn; arguments as in `split_groups`.
    """
    keys = [
        hashlib.blake2b(f"{seed}|{step}|{draw}|{prompt}|{sample}".encode(), digest_size=8).digest()
        for prompt, draw, sample in zip(prompt_ids, draw_ids, sample_indices, strict=True)
    ]
    assignment = torch.zeros(len(keys), dtype=torch.int64)
    for rank, row in enumerate(sorted(range(len(keys)), key=keys.__getitem__)):
        assignment[row] = rank % num_critics
    return assignment


def critic_responses(
    how: CriticData,
    prompt_ids: Sequence[str],
    draw_ids: Sequence[int],
    sample_indices: Sequence[int],
    *,
    num_critics: int,
    seed: int,
    step: int,
    small_groups: SmallGroups = "rotate",
) -> Tensor:
    """Which responses each critic trains on, [M, B] bool.

    Args:
        how: "group_split" is AsyPPO's (every critic sees every prompt, no two the same response);
            "random_split" and
            "shared" (all see all) are ablations.
        prompt_ids: B ids.
        draw_ids: B draw ids.
        sample_indices: B indices within the group.
        num_critics: M.
        seed: of the run.
        step: training step.
        small_groups: of a group with fewer than M responses only some critics see one ("rotate"), or all
            critics see
            all of it ("all").
    """
    if how == "shared":
        return torch.ones(num_critics, len(prompt_ids), dtype=torch.bool)
    split = {"group_split": split_groups, "random_split": random_split}[how]
    assignment = split(prompt_ids, draw_ids, sample_indices, num_critics=num_critics, seed=seed, step=step)
    sees = assignment == torch.arange(num_critics).unsqueeze(1)
    if small_groups == "all":
        sizes = Counter(draw_ids)
        sees |= torch.tensor([sizes[draw] < num_critics for draw in draw_ids], dtype=torch.bool)
    return sees


def crossfit_value(values: Tensor, trained_on: Tensor, lengths: Tensor) -> Tensor:
    """Mean over the critics that were *not* trained on a response, at each of its tokens, [T].

    `advantage_values = crossfit`: a critic that has just been moved towards a response's own return says less
    about its advantage (with learning rate eta on its own half the advantage shrinks by 1 - eta / 2 in the
    mean of two).

    Args:
        values: [M, T] from after the critics' update.
        trained_on: [M, B] bool, from `critic_responses`.
        lengths: [B].

    Raises:
        ValueError: a response with tokens was trained on by every critic.
    """
    check_lengths(lengths, values.shape[1])
    speaks = ~trained_on
    silent = (speaks.sum(0) == 0) & (lengths > 0)
    if bool(silent.any()):
        raise ValueError(
            f"{int(silent.sum())} of {len(lengths)} responses were trained on by all {len(values)} critics, so none "
            "can be cross-fitted; use group_split with at least two critics"
        )
    weights = speaks.to(compute_dtype(values)) / speaks.sum(0).clamp(min=1)
    return (values.to(weights.dtype) * torch.repeat_interleave(weights, lengths, dim=1)).sum(0)


def advantage_values(
    which: AdvantageValues,
    *,
    before: Tensor | None = None,
    after: Tensor | None = None,
    trained_on: Tensor | None = None,
    lengths: Tensor | None = None,
    how: ValueAggregation = "mean",
) -> Tensor:
    """The values that go into GAE, [T].

        post      all critics after their update with this batch      AsyPPO's Algorithm 1; critics train first
        pre       all critics before it                               S3AC, VC-PPO; critics and actor may overlap
        crossfit  after it, without the critics that learned from the response

    Args:
        which: see above.
        before: [M, T], for "pre".
        after: [M, T], for "post" and "crossfit".
        trained_on: [M, B] bool, for "crossfit".
        lengths: [B], for "crossfit".
        how: mean or minimum over critics; crossfit is always a mean.
    """
    needed = before if which == "pre" else after
    if needed is None:
        raise ValueError(
            f"advantage_values = {which!r} needs values from {'before' if which == 'pre' else 'after'} "
            "the critics' update, got None"
        )
    if which != "crossfit":
        return ensemble_value(needed, how)
    if trained_on is None or lengths is None:
        raise ValueError("advantage_values = 'crossfit' needs trained_on and lengths, got None")
    return crossfit_value(needed, trained_on, lengths)
