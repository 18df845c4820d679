"""What a tiny study trains on: a model of two layers, prompts of three tokens, and something to learn in a minute.

A response has exactly ten tokens, so that equal steps are equal tokens. It is right if at least eight of them are odd
or even as the prompt's first token is: an untrained policy is right once in twenty, it has to read the prompt, every
token counts a little, and the value changes along a response.
"""

from collections.abc import Sequence

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model

from asyppo_async.config.sections import TrainConfig
from asyppo_async.trainer.worker.critic_model import Critic, new_value_head
from asyppo_async.trainer.worker.model import Policy
from asyppo_async.types import Prompt
from benchmarks.trends.learning import Engine, TinyRun

VOCABULARY = 16
NUM_TOKENS = 10
NUM_WANTED = 8
PROMPTS = tuple(
    Prompt(id=f"p{index}", task="parity", text="", token_ids=(2 + index % 14, 2 + index // 14, 3), answer="")
    for index in range(112)
)


def reward(prompt: Prompt, token_ids: Sequence[int]) -> float:
    """1 if right, else -1."""
    wanted = prompt.token_ids[0] % 2
    return 1.0 if sum(token % 2 == wanted for token in token_ids) >= NUM_WANTED else -1.0


def model_config(hidden_size: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=hidden_size // 2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )


def fresh_models(config: TrainConfig, *, actor_size: int, critic_size: int) -> tuple[Policy, list[Critic]]:
    """Critics share their backbone's weights at the start, as pretrained ones do."""
    seed = config.run.seed
    torch.manual_seed(seed)
    policy = Policy(Qwen3ForCausalLM(model_config(actor_size)).eval())
    backbone = Qwen3Model(model_config(critic_size)).eval()
    critics = []
    for _ in range(config.critic.count):
        own = Qwen3Model(model_config(critic_size)).eval()
        own.load_state_dict(backbone.state_dict())
        critics.append(Critic(own, new_value_head(critic_size, "float32", seed, std=config.critic.head_std)))
    return policy, critics


def open_study_run(
    config: TrainConfig,
    *,
    lag: int,
    actor_size: int,
    critic_size: int,
    engine: Engine | None = None,
) -> TinyRun:
    """A run from fresh models."""
    policy, critics = fresh_models(config, actor_size=actor_size, critic_size=critic_size)
    return TinyRun(
        config,
        policy=policy,
        critics=critics,
        prompts=PROMPTS,
        reward=reward,
        stop_token_ids=(),
        lag=lag,
        engine=engine,
        fixed_length=True,
    )
