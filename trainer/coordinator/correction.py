"""What the policy update may not learn from: mismatch between engine and trainer, OPSM, M2PO.

Legend: B responses, N = sum of T response tokens.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from asyppo_async.algorithms.mismatch import (
    MismatchCorrection,
    SequenceGate,
    TokenRule,
    TokenRuleKind,
    correct_mismatch,
)
from asyppo_async.algorithms.packed import segment_mean
from asyppo_async.algorithms.trust_masks import m2po_keep, opsm_keep
from asyppo_async.config.algorithm import AlgorithmSection
from asyppo_async.trainer.coordinator.batch import Batch
from asyppo_async.types import Float32Array

TOKEN_RULES: Mapping[str, TokenRuleKind] = {
    "none": "none",
    "icepop": "icepop",
    "icepop_mask": "icepop_mask",
    "tis": "truncate",
    "clamp": "clamp",
    "importance": "importance",
    "kpop": "kpop",
}
"""By the names of `algorithm.mismatch`."""


def mismatch_of(
    batch: Batch, proximal_logprobs: Float32Array, algorithm: AlgorithmSection
) -> MismatchCorrection:
    """Token rule and sequence gates on proximal / behaviour."""
    # What came over a wire is read-only, which torch refuses to look at without a warning.
    return correct_mismatch(
        torch.from_numpy(np.require(proximal_logprobs, requirements="W")),
        torch.from_numpy(np.require(batch.behaviour_logprobs, requirements="W")),
        torch.from_numpy(batch.lengths),
        rule=TokenRule(
            kind=TOKEN_RULES[algorithm.mismatch], low=algorithm.mismatch_low, high=algorithm.mismatch_high
        ),
        gates=[
            SequenceGate(kind=gate.kind, low=gate.low, high=gate.high) for gate in algorithm.sequence_gates
        ],
    )


def by_advantage(
    batch: Batch, mismatch: MismatchCorrection, advantages: Tensor, algorithm: AlgorithmSection
) -> MismatchCorrection:
    """The masks that look at the advantage, taken at the start of the step and frozen with the others."""
    keep_sequences, keep_tokens = mismatch.keep_sequences, mismatch.keep_tokens
    if algorithm.opsm_threshold is not None:
        lengths = torch.from_numpy(batch.lengths)
        keep_sequences = keep_sequences & opsm_keep(
            segment_mean(advantages, lengths),
            mismatch.log_ratio,
            lengths,
            threshold=algorithm.opsm_threshold,
            valid=mismatch.measured,
        )
    if algorithm.m2po_threshold is not None:
        keep_tokens = keep_tokens & m2po_keep(
            mismatch.log_ratio,
            threshold=algorithm.m2po_threshold,
            advantages=advantages,
            candidates=algorithm.m2po_candidates,
            strict=algorithm.m2po_strict,
            valid=mismatch.measured,
        )
    return replace(mismatch, keep_sequences=keep_sequences, keep_tokens=keep_tokens)
