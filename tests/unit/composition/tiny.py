"""A model of two layers, prompts of three tokens, and a task that it can learn in a few steps."""

from collections.abc import Sequence

import torch
from transformers import (
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from asyppo_async.config.load import config_from_tree, load_preset
from asyppo_async.config.sections import TrainConfig
from asyppo_async.trainer.worker.critic_model import Critic, new_value_head
from asyppo_async.trainer.worker.model import Policy
from asyppo_async.types import Prompt
from benchmarks.trends.learning import TinyRun

VOCABULARY, EOS = 16, 1
MAX_TOKENS = 6
PROMPTS = tuple(
    Prompt(id=f"p{index}", task="parity", text="", token_ids=(2 + index % 14, 2 + index // 14, 3), answer="")
    for index in range(40)
)


def reward(prompt: Prompt, token_ids: Sequence[int]) -> float:
    """Right if the first token is even: one half of untrained responses."""
    return 1.0 if token_ids[0] % 2 == 0 else -1.0


def tiny_config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        eos_token_id=EOS,
    )


NUM_EXPERTS, EXPERTS_PER_TOKEN = 8, 2


def mixture_config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        **{name: value for name, value in tiny_config().to_dict().items() if name in SHARED},
        moe_intermediate_size=16,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        norm_topk_prob=True,
    )


SHARED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "tie_word_embeddings",
    "eos_token_id",
)
"""Settings that both architectures have."""


def scripted_experts(ids: torch.Tensor) -> torch.Tensor:
    """[R, L, layers, 2] by a rule that no router follows: an engine whose choice differs from the trainer's."""
    positions = torch.arange(ids.shape[1])
    layers = torch.arange(tiny_config().num_hidden_layers)
    first = (3 * ids[..., None] + 5 * positions[None, :, None] + layers) % NUM_EXPERTS
    second = (first + 1 + ids[..., None] % (NUM_EXPERTS - 1)) % NUM_EXPERTS
    return torch.stack([first, second], -1)


def shrunk(preset: str, *overrides: str) -> TrainConfig:
    """The preset at a size that trains in a second: its sizes are cut, its method stays."""
    tree = load_preset(preset)
    sections = {name: dict(tree.get(name, {})) for name in ("actor", "critic", "batch", "sampling")}  # type: ignore[call-overload]
    grouped = sections["batch"].get("group_size", 8) > 1
    sections["batch"] |= {"prompts": 4 if grouped else 12, "group_size": 4 if grouped else 1}
    sections["actor"] |= {
        "model": "a",
        "learning_rate": 5e-3,
        "learning_rate_warmup_steps": 0,
        "mini_batches": 2,
    }
    sections["critic"] |= {
        "learning_rate": 5e-3,
        "learning_rate_warmup_steps": 0,
        "warmup_steps": 0,
        "mini_batches": 2,
    }
    sections["critic"].setdefault("model", "c")
    sections["sampling"] |= {"max_tokens": MAX_TOKENS}
    cut = {**tree, **sections, "staleness": {"max_staleness": 4}}
    algorithm = dict(cut["algorithm"])  # type: ignore[call-overload]
    if algorithm.get("overlong_cache_tokens", 0):
        algorithm["overlong_cache_tokens"] = 2
    if "selection" in cut:
        cut["selection"] = {**cut["selection"], "uniform_steps": 1, "ramp_steps": 1}  # type: ignore[dict-item]
    return config_from_tree({**cut, "algorithm": algorithm}, overrides)


def open_run(
    config: TrainConfig, *, seed: int = 0, lag: int = 0, is_mixture: bool | None = None
) -> tuple[TinyRun, Policy, list[Critic]]:
    """`is_mixture`: of experts, on an engine that routes by a script; None: where the configuration replays."""
    torch.manual_seed(seed)
    mixed = config.actor.routing_replay if is_mixture is None else is_mixture
    model = Qwen3MoeForCausalLM(mixture_config()) if mixed else Qwen3ForCausalLM(tiny_config())
    policy = Policy(model.eval())
    critics = [
        Critic(Qwen3Model(tiny_config()).eval(), new_value_head(32, "float32", seed))
        for _ in range(config.critic.count)
    ]
    run = TinyRun(
        config,
        policy=policy,
        critics=critics,
        prompts=PROMPTS,
        reward=reward,
        stop_token_ids=(EOS,),
        lag=lag,
        script=scripted_experts if mixed else None,
    )
    return run, policy, critics
