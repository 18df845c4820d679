"""Tiny models, batches, and ranks without their processes, for the worker's tests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from asyppo_async.config.critic import CriticSection
from asyppo_async.config.sections import ActorSection
from asyppo_async.trainer.worker.actor import Actor
from asyppo_async.trainer.worker.backend.plain import PlainBackend
from asyppo_async.trainer.worker.control import ComputeDtype, WorkerRole, WorkerSettings
from asyppo_async.trainer.worker.critic import CriticLearner
from asyppo_async.trainer.worker.critic_model import BACKBONE, Critic, load_critic
from asyppo_async.trainer.worker.documents import let_pack
from asyppo_async.trainer.worker.learning_rate import LearningRate
from asyppo_async.trainer.worker.lora import NO_ADAPTERS, Adapters
from asyppo_async.trainer.worker.lora_layers import adapt
from asyppo_async.trainer.worker.messages import ActorTrain, CriticTrain, MiniBatches
from asyppo_async.trainer.worker.model import Policy, load_policy, recompute_layers, silence_transformers
from asyppo_async.trainer.worker.packing import Cutting
from asyppo_async.trainer.worker.specs import GroupTimes, specs_of
from asyppo_async.trainer.worker.steps import Stepper
from asyppo_async.trainer.worker.world import World
from asyppo_async.types import TokenSequences, concatenate_sequences

VOCABULARY = 23
TINY_SIZES: dict[str, int | bool] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
}
T = TypeVar("T")


def tiny_config(**changes: int | bool) -> Qwen3Config:
    return Qwen3Config(**({**TINY_SIZES, "tie_word_embeddings": True} | changes))


def write_model(folder: Path, **changes: int | bool) -> Path:
    """A Qwen3 of random weights, large enough that every token has its own distribution."""
    torch.manual_seed(5)
    return save_scattered(folder, Qwen3ForCausalLM(tiny_config(**changes)))


def write_mixture(folder: Path) -> Path:
    """The same as a mixture of eight experts, of which each token uses two."""
    torch.manual_seed(5)
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "norm_topk_prob": True,
    }
    return save_scattered(folder, Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY_SIZES, **experts)))


def save_scattered(folder: Path, model: PreTrainedModel) -> Path:
    """With noise on every weight, norms and biases included."""
    silence_transformers()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def write_small_norms(folder: Path) -> Path:
    """As `write_model`, with one small element in each norm: at 1, bfloat16 needs thousands of steps to change."""
    torch.manual_seed(5)
    model = Qwen3ForCausalLM(tiny_config())
    save_scattered(folder, model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter[1] = 0.005
    model.save_pretrained(folder)
    return folder


def lost_alone(served: Tensor, rate: float) -> Tensor:
    """Which elements of bfloat16 weights one optimizer step at this rate leaves as they are, whatever its sign."""
    step = 1.5 * rate  # Adam's are no larger than the rate, but for the decay of weights
    return torch.stack([(served.float() + sign * step).bfloat16() == served for sign in (-1, 1)]).all(0)


def random_sequences(seed: int, num_sequences: int) -> TokenSequences:
    random = np.random.default_rng(seed)
    return concatenate_sequences(
        [
            (
                random.integers(0, VOCABULARY, random.integers(1, 7)),
                random.integers(0, VOCABULARY, random.integers(1, 10)).astype(np.int32),
            )
            for _ in range(num_sequences)
        ]
    )


class RecordingBackend(PlainBackend):
    """Keeps the summed gradient of every step, by parameter name."""

    def __init__(
        self, model: Policy | Critic, world: World, rate: float = 1e-3, adapters: Adapters = NO_ADAPTERS
    ) -> None:
        super().__init__(
            model.module,
            model.root,
            world=world,
            learning_rate=LearningRate(peak=rate, warmup_steps=0),
            weight_decay=0.0,
            max_grad_norm=1.0,
            adapters=adapters,
        )
        self.gradients: list[dict[str, Tensor]] = []

    def _summed_gradients(self) -> list[Tensor]:
        gradients = super()._summed_gradients()
        self.gradients.append(
            {name: gradient.clone() for name, gradient in zip(self._names, gradients, strict=True)}
        )
        return gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner(Generic[T]):
    """One rank without its process."""

    learner: T
    backend: RecordingBackend
    module: nn.Module
    adapters: Adapters = NO_ADAPTERS


def lora_settings(folder: Path, role: WorkerRole, rank: int, **changes: object) -> WorkerSettings:
    """Of a rank with adapters; `changes`: further settings of its section."""
    own: dict[str, object] = {"model": folder, "lora_rank": rank, "lora_alpha": 3.0 * max(rank, 1), **changes}
    specs = specs_of(
        ActorSection.model_validate(own if role == "actor" else {"model": folder}),
        CriticSection.model_validate({"count": 1, **(own if role == "critic" else {"model": folder})}),
        seed=4,
        bucket_bytes=2048,
        times=GroupTimes(join_timeout_s=1, request_timeout_s=1, silent_after_s=1),
    )
    return specs[0 if role == "actor" else 1].settings


@torch.no_grad()
def move_adapters(module: nn.Module, seed: int = 6) -> None:
    """Away from where they start, at which B is 0 and A has no gradient."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        if ".lora_B." in name:
            weight.copy_(0.1 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))


def open_actor(
    folder: Path,
    *,
    dtype: ComputeDtype = "float64",
    micro_batch_tokens: int = 4096,
    budget: int = 0,
    world: World | None = None,
    recompute: bool = False,
    packed: bool = False,
    rate: float = 1e-3,
    lora: int = 0,
) -> Learner[Actor]:
    world = world or World.alone()
    policy = load_policy(folder, dtype)
    adapters = adapt(policy.module, lora_settings(folder, "actor", lora))
    move_adapters(policy.module)
    if recompute:
        recompute_layers(policy.root)
    if packed:
        let_pack(policy.root)
    backend = RecordingBackend(policy, world, rate, adapters)
    cutting = Cutting(budget_tokens=micro_batch_tokens, packed=packed)
    stepper = Stepper(backend, world, cutting=cutting, non_finite_budget=budget)
    actor = Actor(policy, stepper)
    return Learner(learner=actor, backend=backend, module=policy.module, adapters=adapters)


def open_critic(
    folder: Path,
    *,
    dtype: ComputeDtype = "float64",
    micro_batch_tokens: int = 4096,
    budget: int = 0,
    world: World | None = None,
    recompute: bool = False,
    packed: bool = False,
    lora: int = 0,
) -> Learner[CriticLearner]:
    world = world or World.alone()
    critic = load_critic(folder, dtype, seed=1)
    adapters = adapt(critic.root, lora_settings(folder, "critic", lora), prefix=BACKBONE)
    move_adapters(critic.root)
    if recompute:
        recompute_layers(critic.root)
    if packed:
        let_pack(critic.root)
    backend = RecordingBackend(critic, world, adapters=adapters)
    cutting = Cutting(budget_tokens=micro_batch_tokens, packed=packed)
    stepper = Stepper(backend, world, cutting=cutting, non_finite_budget=budget)
    learner = CriticLearner(critic, stepper)
    return Learner(learner=learner, backend=backend, module=critic.module, adapters=adapters)


def actor_request(sequences: TokenSequences, sizes: Sequence[int], **changes: object) -> ActorTrain:
    """A training request with weights of both kinds, some of them exactly 0, and ratios on both sides of the clip."""
    random = np.random.default_rng(11)
    num_tokens = sequences.num_response_tokens
    settings: dict[str, object] = {
        "sequences": sequences,
        "proximal_logprobs": random.normal(-3, 0.5, num_tokens).astype(np.float32),
        "advantages": random.normal(0, 1, num_tokens).astype(np.float32),
        "policy_weights": (random.random(num_tokens) * (random.random(num_tokens) > 0.3)).astype(np.float32),
        "entropy_weights": (random.random(num_tokens) > 0.2).astype(np.float32),
        "mini_batches": mini_batches(sequences, sizes),
        "temperature": 0.8,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "entropy_coefficient": 0.03,
    }
    return ActorTrain(**(settings | changes))  # type: ignore[arg-type]


def critic_request(sequences: TokenSequences, sizes: Sequence[int], **changes: object) -> CriticTrain:
    random = np.random.default_rng(12)
    num_tokens = sequences.num_response_tokens
    settings: dict[str, object] = {
        "sequences": sequences,
        "targets": random.choice([-1.0, 1.0], num_tokens).astype(np.float32),
        "weights": (random.random(num_tokens) > 0.3).astype(np.float32),
        "old_values": random.normal(0, 0.3, num_tokens).astype(np.float32),
        "mini_batches": mini_batches(sequences, sizes),
        "value_clip": None,
    }
    return CriticTrain(**(settings | changes))  # type: ignore[arg-type]


def mini_batches(sequences: TokenSequences, sizes: Sequence[int]) -> MiniBatches:
    """The sequences in turn, again from the first when they are through."""
    return MiniBatches(
        sequence_indices=(np.arange(sum(sizes)) % sequences.num_sequences).astype(np.int32),
        sizes=np.array(sizes, dtype=np.int32),
        denominators=np.full(len(sizes), 37.0),
    )


def largest_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Over the tensors: norm of the difference over norm (invariant 5)."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in one)
