"""Rules for putting the parts together: what may not be combined, and in which order the masks multiply.

    J = (1/D) sum m_val m_stale m_seq m_tok I_A sg(w_t) l(r_t, A_t)  +  beta_H (1/D) sum m_val m_stale m_seq I_H H_t

Legend: `T` packed tokens.
"""

from typing import Literal

import torch
from torch import Tensor

from asyppo_async.algorithms.mismatch import TokenRuleKind
from asyppo_async.algorithms.token_classes import TokenMasks
from asyppo_async.errors import ConfigError

LossReference = Literal["proximal", "behaviour"]
WEIGHTING_RULES: tuple[TokenRuleKind, ...] = ("icepop", "truncate", "clamp", "importance")


def check_ratio_use(loss_reference: LossReference, token_rule: TokenRuleKind) -> None:
    """Refuse a loss on u = pi_theta / mu together with a weight rho: u = rho r, so rho would count twice.

    Args:
        loss_reference: the policy that the ratio of the loss is over.
        token_rule: of the mismatch correction.

    Raises:
        ConfigError: the two together count the mismatch twice.
    """
    if loss_reference == "behaviour" and token_rule in WEIGHTING_RULES:
        raise ConfigError(
            f"the loss uses the ratio over the behaviour policy and the mismatch rule {token_rule!r} weights by "
            "pi_old / mu as well, which counts the mismatch twice; use 'none', 'icepop_mask' or 'kpop', or a loss "
            "over the proximal policy"
        )


def policy_coefficients(masks: TokenMasks, weights: Tensor, advantage_keep: Tensor | None = None) -> Tensor:
    """m_val m_stale m_seq m_tok I_A w per token, [T]; exactly 0 wherever a mask is, whatever the weight
    holds.
    """
    keep = masks.policy if advantage_keep is None else masks.policy & advantage_keep
    return torch.where(keep, weights, 0.0)


def entropy_coefficients(masks: TokenMasks, entropy_keep: Tensor | None = None) -> Tensor:
    """m_val m_stale m_seq I_H per token, [T] bool."""
    return masks.entropy if entropy_keep is None else masks.entropy & entropy_keep
