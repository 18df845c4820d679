"""The method of a run: estimator, policy loss, mismatch correction, critics' part, selection of tokens.

Where papers leave a choice open, the choice is a key here; `docs/algorithms.md` lists them all.
"""

from typing import Annotated, Literal

from pydantic import Field

from asyppo_async.config.base import Section, Share

Estimator = Literal[
    "gae",
    "evpo",
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "flash_reinforce",
    "spo",
]
LossKind = Literal[
    "ppo",
    "cispo",
    "dis",
    "gspo",
    "gspo_token",
    "aspo",
    "topr",
    "dppo",
    "reinforce",
    "gepo_expectation",
]
TokenScore = Literal["value_std", "entropy", "random", "none"]


class SequenceGateSection(Section):
    """One test that a whole response must pass, or none of its tokens trains the policy."""

    kind: Literal["max_log_ratio", "max_ratio", "token_band", "product", "geometric", "binary_kl"]
    """Of the ratios of a response: largest |log|, largest, all within, product, geometric mean, mean binary KL."""
    low: float = Field(default=0.0, ge=0)
    high: float = Field(gt=0)


class AlgorithmSection(Section):
    schedule: Literal["post", "pre", "critic_ahead"] = "post"
    """When the critics train: before the advantages (AsyPPO, Algorithm 1), beside the actor on values from before
    (S3AC, VC-PPO), or one batch ahead of the actor."""
    advantage_values: Literal["post", "pre", "crossfit"] | None = None
    """Values that the advantages are made from: after the critics' update, before it, or after it without the critics
    that learned from the response. None: what the schedule says, `pre` under `pre`, else `post`."""

    estimator: Estimator = "gae"
    """Where advantages come from: critics (gae, evpo), the group, the batch, or a table of prompts (spo)."""
    critic_use: Literal["both", "prompt", "token"] = "both"
    """What of the critics' opinion reaches the advantages (gae): all of it; of the prompt alone, A = R - V(s_0); or of
    the tokens alone, A_t = GAE_t - mean of GAE over the response + R - mean R of the batch."""
    lambda_actor: Annotated[float, Field(ge=0, le=1)] | Literal["adaptive"] = 1.0
    """GAE lambda of the advantages; `adaptive`: 1 - 1 / (alpha T) for each response of T tokens."""
    lambda_alpha: float = Field(default=1.5, gt=0)
    lambda_critic: float = Field(default=1.0, ge=0, le=1)
    """1: Monte Carlo returns as the critics' targets."""
    value_aggregation: Literal["mean", "min", "confidence"] = "mean"
    """Over critics; `confidence` weighs them by the inverse of their running calibration error."""
    calibration_bins: int = Field(default=10, ge=1)
    calibration_rate: float = Field(default=0.1, gt=0, le=1)
    """Of the moving average of the calibration error."""
    evpo_threshold: float = 0.0
    """Explained variance above which EVPO trusts the critics."""
    evpo_mean: Literal["batch", "group"] = "batch"
    """EVPO's baseline where it does not."""
    group_std_unbiased: bool = True
    """GRPO's std divides by K - 1 (library practice) instead of K."""
    group_singleton: Literal["zero", "reward"] = "zero"
    """GRPO's advantage of a response that has lost all its siblings."""
    whiten_advantages: Literal["off", "batch", "group"] = "off"
    """Over the tokens of the batch, or of each group."""
    whiten_unbiased: bool = False
    truncated: Literal["finished", "scored", "bootstrap", "egae"] = "finished"
    """A response at maximum length: ended and wrong (-1), ended with the reward that its text earns, without a reward
    and V(s_T) of the critics, or without a reward and V(s_T) = V(s_{T-1}) (T-PPO)."""
    overlong_cache_tokens: int = Field(default=0, ge=0)
    """DAPO's soft penalty grows over so many tokens before `sampling.max_tokens`; 0 is off."""
    group_entropy_scaling: bool = False
    """GEPO (2607.16850): smaller advantages where a group's entropy is already low, or already high."""

    loss: LossKind = "ppo"
    loss_reference: Literal["proximal", "behaviour"] = "proximal"
    """What the ratio of the loss is over: the trainer's policy at the start of the step, or what the engine sampled
    from (two-policy; then no mismatch weight). `dis` and `dppo` are always over the behaviour policy."""
    proximal: Literal["forward", "a3po"] = "forward"
    """The proximal log-probs: the actor's at the start of the step, or A-3PO's approximation from them by age."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    clip_high: float = Field(default=0.2, gt=0)
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound on the ratio of a negative advantage (ppo); ASPO's cap of the turned ratio, which it needs."""
    cispo_bounds: Literal["relative", "upper_only", "absolute"] = "relative"
    """[1 - clip_low, 1 + clip_high], no lower bound, or at most `clip_high` itself (TRL)."""
    cispo_unified_mask: bool = False
    """Drop a token where PPO's clip would (MiniMax-M1)."""
    topr_level: Literal["token", "sequence"] = "token"
    dppo_kl_coefficient: float = Field(default=1e-3, ge=0)
    gepo_length_normalised: bool = True
    """Probabilities of responses per token (geometric mean) in GEPO's group expectation."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Of a penalty on the divergence from the frozen `actor.reference`, or from what the ratio of the loss is over."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """k2 and k3 are terms of the loss, on the tokens that train and with their weights. k1 has no gradient in the mean,
    so it is a cost per token in the advantages, and needs `actor.reference`."""
    positive_nll_coefficient: float = Field(default=0.0, ge=0)
    """Of the likelihood of right responses, over their own tokens (VAPO: 0.1)."""
    aggregation: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = "seq-mean-token-mean"

    advantage_mask_share: Share = 0.2
    """Share of tokens, lowest score of the batch, whose advantage is masked (k)."""
    advantage_mask_by: TokenScore = "value_std"
    """The score; others than `value_std` are ablations with the same count and ties."""
    advantage_mask_end: Literal["lowest", "highest"] = "lowest"
    entropy_filter_share: Share = 0.2
    """Share of tokens, highest score of the batch, left out of the entropy bonus (h)."""
    entropy_filter_by: TokenScore = "value_std"
    entropy_filter_end: Literal["lowest", "highest"] = "highest"
    selection_scope: Literal["batch", "sequence"] = "batch"
    value_std_sample: bool = False
    """Divide the variance over critics by M - 1; no ranking changes."""
    entropy_coefficient: float = Field(default=0.01, ge=0)

    mismatch: Literal["none", "icepop", "icepop_mask", "tis", "clamp", "importance", "kpop"] = "icepop"
    """Correction by proximal / behaviour ratios: none, IcePoP with or without the ratio as weight, TIS, the ratio
    clamped or plain, or KPop (binary KL below `mismatch_high`). With `ppo` a weight makes decoupled PPO (AReaL)."""
    mismatch_low: float = Field(default=0.5, ge=0)
    mismatch_high: float = Field(default=5.0, gt=0)
    sequence_gates: tuple[SequenceGateSection, ...] = ()
    """MIS and its relatives; a response must pass all."""
    opsm_threshold: float | None = Field(default=None, ge=0)
    """Off-policy sequence mask: a response with A < 0 needs mean(log mu - log pi) at most this."""
    m2po_threshold: float | None = Field(default=None, gt=0)
    """M2PO: drop the largest |log ratio| to the behaviour until their mean square is at most this (.04)."""
    m2po_candidates: Literal["trust_region", "all"] = "trust_region"
    m2po_strict: bool = False
    renormalise: bool = False
    """Divide by the tokens that are kept instead of by all valid ones."""
    critic_trains_on: Literal["all", "kept"] = "all"
    """Whether rejected, stale and filtered tokens still train the critics."""
