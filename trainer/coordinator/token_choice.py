"""AsyPPO's advantage mask and entropy filter, or an ablation of either.

Legend: N = sum of T response tokens.
"""

import numpy as np
import torch

from asyppo_async.algorithms.critics import ValueStdMasks
from asyppo_async.algorithms.token_classes import TokenMasks
from asyppo_async.algorithms.token_selection import TokenSelection, choose_scores, select_tokens
from asyppo_async.config.algorithm import AlgorithmSection
from asyppo_async.trainer.coordinator.batch import Batch
from asyppo_async.types import Float32Array


def choose_tokens(
    batch: Batch,
    std: torch.Tensor,
    masks: TokenMasks,
    entropies: Float32Array | None,
    *,
    algorithm: AlgorithmSection,
    seed: int,
) -> ValueStdMasks:
    """What is masked and filtered, out of the ranked tokens, by [N] value std or [N] entropies."""
    lengths = torch.from_numpy(batch.lengths)
    surprise = None if entropies is None else torch.from_numpy(np.require(entropies, requirements="W"))

    def select(purpose: str) -> TokenSelection:
        is_mask = purpose == "advantage"
        share = algorithm.advantage_mask_share if is_mask else algorithm.entropy_filter_share
        scores = choose_scores(
            algorithm.advantage_mask_by if is_mask else algorithm.entropy_filter_by,
            value_std=std,
            entropies=surprise,
            seed=seed,
            step=batch.step,
            purpose=purpose,
        )
        return select_tokens(
            scores if share > 0 else None,
            share,
            algorithm.advantage_mask_end if is_mask else algorithm.entropy_filter_end,
            valid=masks.ranking,
            scope=algorithm.selection_scope,
            lengths=lengths,
        )

    masked, filtered = select("advantage"), select("entropy")
    return ValueStdMasks(
        advantage_keep=masks.ranking & ~masked.selected,
        entropy_keep=masks.ranking & ~filtered.selected,
        num_advantage_masked=masked.count,
        num_entropy_filtered=filtered.count,
        degenerate=masked.degenerate or filtered.degenerate,
    )
