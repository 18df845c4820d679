"""What the coordinator and the worker groups say to each other: typed values, no I/O.

Per-token arrays are flat over the responses of a `TokenSequences`, in its order. A request is computed on the whole
batch by the coordinator; the group client cuts it into one shard per rank and puts the results together again.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from asyppo_async.algorithms.policy_losses import PPO, PolicyLoss
from asyppo_async.trainer.worker.array_checks import check_per_token, check_routing, check_sequences
from asyppo_async.types import BoolArray, Float32Array, Int16Array, Int32Array, TokenSequences

Float64Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorForward:
    """Log-probs of given responses (proximal log-probs, probe sequences)."""

    sequences: TokenSequences
    temperature: float
    top_p: float = 1.0
    """Below 1, and with `top_k` above 0: renormalised over the tokens that these keep of the actor's distribution."""
    top_k: int = 0
    routed_experts: Int16Array | None = None
    """[sum (P + T - 1), layers, experts per token] to use instead of the actor's own choice (R3)."""
    with_reference: bool = False
    """Score with the frozen reference model as well."""

    def __post_init__(self) -> None:
        check_sequences(self.sequences)
        check_routing(self.sequences, self.routed_experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorForwardResult:
    logprobs: Float32Array
    """[sum T]; -inf for a token outside the kept set, which the actor could not have sampled."""
    entropies: Float32Array
    """[sum T] of the full distribution at `temperature`."""
    compute_s: float
    reference_logprobs: Float32Array | None = None
    """[sum T] as `logprobs`, of the frozen reference model; None: not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatches:
    """Which sequences each optimizer step sees, over all epochs, and what its sums are divided by.

    The denominators are global (over ranks and micro-batches), so that no cutting changes a gradient (invariant 5).
    """

    sequence_indices: Int32Array
    """[sum of sizes] indices into the batch, optimizer step after optimizer step."""
    sizes: Int32Array
    """[S] sequences of each optimizer step; a size of 0 is a step that is skipped."""
    denominators: Float64Array
    """[S]"""

    def __post_init__(self) -> None:
        if int(self.sizes.sum(dtype=np.int64)) != len(self.sequence_indices):
            raise ValueError(
                f"sizes sum to {int(self.sizes.sum(dtype=np.int64))}, got {len(self.sequence_indices)} indices"
            )
        if len(self.denominators) != len(self.sizes):
            raise ValueError(f"{len(self.sizes)} optimizer steps but {len(self.denominators)} denominators")

    def check_against(self, sequences: TokenSequences) -> None:
        """Raise `ValueError` for an index that is not one of the batch."""
        indices = self.sequence_indices
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < sequences.num_sequences:
            raise ValueError(
                f"sequence indices reach from {int(indices.min())} to {int(indices.max())}, "
                f"the batch has {sequences.num_sequences} sequences"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PositiveLikelihood:
    """`- coefficient * sum(log pi over tokens) / D`, beside the policy loss (VAPO)."""

    tokens: BoolArray
    """[sum T] of right responses."""
    denominators: Float64Array
    """[S] number of those tokens in each optimizer step, over all ranks; 0: none."""
    coefficient: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorTrain:
    """One training step of the actor: `sum(policy_weights * loss) / D - beta * sum(entropy_weights * H) / D`."""

    sequences: TokenSequences
    proximal_logprobs: Float32Array
    """[sum T] what the ratio of the loss is over; in a two-policy loss the behaviour policy takes this place."""
    advantages: Float32Array
    """[sum T]"""
    policy_weights: Float32Array
    """[sum T] masks x mismatch weight x the token's share in the aggregation; exactly 0 where a token has no say."""
    entropy_weights: Float32Array
    """[sum T] filter x masks x the token's share in the aggregation."""
    mini_batches: MiniBatches
    temperature: float
    clip_low: float
    clip_high: float
    entropy_coefficient: float
    loss: PolicyLoss = PPO
    counted: BoolArray | None = None
    """[sum T] tokens that the mean log ratio of a response is over; None: all, or none is asked for."""
    masked: BoolArray | None = None
    """[sum T] tokens whose advantage is masked and that would train without the mask; only measured."""
    kl_coefficient: float = 0.0
    """Of `sum(policy_weights * KL) / D`, from the policy to `reference_logprobs`, or to `proximal_logprobs` where there
    are none."""
    reference_logprobs: Float32Array | None = None
    """[sum T] of the frozen reference model; what is not finite adds nothing."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    positives: PositiveLikelihood | None = None
    reset_optimizer: bool = False
    """Forget the optimizer's moments before the first step."""
    top_p: float = 1.0
    """As in `ActorForward`; a token that falls outside the kept set loses its weight."""
    top_k: int = 0
    routed_experts: Int16Array | None = None
    """As in `ActorForward`."""

    def __post_init__(self) -> None:
        check_sequences(self.sequences)
        check_routing(self.sequences, self.routed_experts)
        check_per_token(
            self.sequences,
            counted=self.counted,
            masked=self.masked,
            positives=None if self.positives is None else self.positives.tokens,
            proximal_logprobs=self.proximal_logprobs,
            reference_logprobs=self.reference_logprobs,
            advantages=self.advantages,
            policy_weights=self.policy_weights,
            entropy_weights=self.entropy_weights,
        )
        self.mini_batches.check_against(self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticForward:
    sequences: TokenSequences

    def __post_init__(self) -> None:
        check_sequences(self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticForwardResult:
    values: Float32Array
    """[sum T]: V(s_t) for t = 0..T-1, that is, from the last prompt token on (`algorithms.md` 0.1)."""
    compute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticTrain:
    """One training step of a critic: `sum(weights * 1/2 (V - target)^2) / D`, clipped around `old_values` if asked.

    `half` false leaves the factor out, as AsyPPO's equation does.
    """

    sequences: TokenSequences
    targets: Float32Array
    """[sum T]"""
    weights: Float32Array
    """[sum T]"""
    old_values: Float32Array
    """[sum T]; read only where `value_clip` is set."""
    mini_batches: MiniBatches
    value_clip: float | None
    half: bool = True

    def __post_init__(self) -> None:
        check_sequences(self.sequences)
        check_per_token(
            self.sequences, targets=self.targets, weights=self.weights, old_values=self.old_values
        )
        self.mini_batches.check_against(self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartNorms:
    """Norms of a critic's two parts, as far as they train; they learn at different scales (`algorithms.md` 4.5)."""

    head_gradient: float
    """Over all ranks, before clipping, as is `backbone_gradient`."""
    backbone_gradient: float
    head_weights: float
    """After the step, as is `backbone_weights`."""
    backbone_weights: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """What one optimizer step measured; sums are over all ranks, ratios are over the tokens that had weight."""

    loss: float
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    skipped: bool
    """The loss or the gradient was not finite, or nothing had weight."""
    num_tokens: int
    """Tokens with weight."""
    entropy: float
    """Mean over the tokens with entropy weight; NaN for a critic."""
    clip_fraction_low: float
    """Share of weighted tokens with A < 0 and ratio < 1 - clip_low (for a critic with `value_clip`: clipped ones)."""
    clip_fraction_high: float
    ratio_mean: float
    ratio_max: float
    kl_proximal: float
    """k3 estimate of KL(proximal || policy)."""
    kl_proximal_k1: float = math.nan
    """k1 estimate of the same: of one sample it may be negative."""
    ratio_p1: float = math.nan
    """Percentile of the ratio, as is `ratio_p99`; right to 0.9 % of its logarithm."""
    ratio_p99: float = math.nan
    masked_clip_fraction: float = math.nan
    """Share of the `masked` tokens that the clip would have acted on, of those that the actor reads for their entropy.
    NaN if there are none."""
    parts: PartNorms | None = None
    """None for an actor, and where nothing had weight or the loss was not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    steps: tuple[OptimizerStep, ...]
    compute_s: float
    activation_bytes: int = 0
    """That the first micro-batch, which is among the largest, kept for its backward; the most of any rank."""
    peak_bytes: int = 0
    """Highest use of memory in this request: of a GPU, or of a rank's process; the most of any rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Write the model as a Hugging Face folder."""

    folder: str
    adapter: bool = False
    """Only its adapters, as peft's folder."""
