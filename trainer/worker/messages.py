"""What the coordinator and the worker groups say to each other: typed values, no I/O.

Per-token arrays are flat over the responses of a `TokenSequences`, in its order. A request is computed on the whole
batch by the coordinator; the group client cuts it into one shard per rank and puts the results together again.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from asyppo_async.algorithms.policy_losses import PPO, PolicyLoss
from asyppo_async.types import BoolArray, Float32Array, Int32Array, TokenSequences

Float64Array = NDArray[np.float64]


def _check_sequences(sequences: TokenSequences) -> None:
    """Refuse what no forward could be right about: lengths that do not add up, a prompt or response of nothing."""
    prompts, responses = sequences.prompt_lengths, sequences.response_lengths
    if len(prompts) != len(responses):
        raise ValueError(f"{len(prompts)} prompt lengths but {len(responses)} response lengths")
    for what, lengths, tokens in (
        ("prompt", prompts, sequences.prompt_token_ids),
        ("response", responses, sequences.response_token_ids),
    ):
        if len(lengths) and int(lengths.min()) < 1:
            raise ValueError(f"every {what} needs at least one token, got a length of {int(lengths.min())}")
        if int(lengths.sum(dtype=np.int64)) != len(tokens):
            raise ValueError(
                f"{what} lengths sum to {int(lengths.sum(dtype=np.int64))}, got {len(tokens)} tokens"
            )


def _check_per_token(sequences: TokenSequences, **arrays: Float32Array | BoolArray | None) -> None:
    for name, values in arrays.items():
        if values is not None and values.shape != (sequences.num_response_tokens,):
            raise ValueError(
                f"{name} must have one number for each of {sequences.num_response_tokens} response tokens, "
                f"got shape {list(values.shape)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorForward:
    """Log-probs of given responses (proximal log-probs, probe sequences)."""

    sequences: TokenSequences
    temperature: float
    top_p: float = 1.0
    """Below 1, and with `top_k` above 0: renormalised over the tokens that these keep of the actor's distribution."""
    top_k: int = 0

    def __post_init__(self) -> None:
        _check_sequences(self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorForwardResult:
    logprobs: Float32Array
    """[sum T]; -inf for a token outside the kept set, which the actor could not have sampled."""
    entropies: Float32Array
    """[sum T] of the full distribution at `temperature`."""
    compute_s: float


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
    kl_coefficient: float = 0.0
    """Of `sum(policy_weights * KL) / D`, from the policy to `proximal_logprobs`."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    positives: PositiveLikelihood | None = None
    reset_optimizer: bool = False
    """Forget the optimizer's moments before the first step."""
    top_p: float = 1.0
    """As in `ActorForward`; a token that falls outside the kept set loses its weight."""
    top_k: int = 0

    def __post_init__(self) -> None:
        _check_sequences(self.sequences)
        _check_per_token(
            self.sequences,
            counted=self.counted,
            positives=None if self.positives is None else self.positives.tokens,
            proximal_logprobs=self.proximal_logprobs,
            advantages=self.advantages,
            policy_weights=self.policy_weights,
            entropy_weights=self.entropy_weights,
        )
        self.mini_batches.check_against(self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticForward:
    sequences: TokenSequences

    def __post_init__(self) -> None:
        _check_sequences(self.sequences)


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
        _check_sequences(self.sequences)
        _check_per_token(
            self.sequences, targets=self.targets, weights=self.weights, old_values=self.old_values
        )
        self.mini_batches.check_against(self.sequences)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    steps: tuple[OptimizerStep, ...]
    compute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStore:
    """Where rank 0's store listens, for one epoch of the weight session."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendResult:
    checksums: tuple[int, ...]
    """CRC-32 of each tensor's bytes as sent, in manifest order."""
    num_bytes: int
    gather_s: float
    wire_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession:
    """Open the store of a weight session at rank 0."""

    host: str
    epoch: int
    world_size: int
    """Of the session: rank 0 and the servers' workers."""
    backend: Literal["gloo", "nccl"]
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSession:
    """Join the process group of the open session; returns when all its members have."""

    epoch: int
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SendWeights:
    version: int
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSession:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Write the model as a Hugging Face folder."""

    folder: str
