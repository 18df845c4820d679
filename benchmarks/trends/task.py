"""What a tiny study trains on: a model of two layers, prompts of three tokens, and something to learn in a minute.

A response is right if it has at least four tokens before its end that are odd or even as the prompt's first token is:
the policy has to read the prompt, every token counts, and the value changes along a response.
"""

from collections.abc import Sequence

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model

from asyppo_async.config.sections import TrainConfig
from asyppo_async.trainer.worker.model import Critic, Policy, new_value_head
from asyppo_async.types import Prompt
from benchmarks.trends.learning import TinyRun

VOCABULARY, EOS = 16, 1
NUM_WANTED = 4
MAX_TOKENS = 6
PROMPTS = tuple(
    Prompt(id=f"p{index}", task="parity", text="", token_ids=(2 + index % 14, 2 + index // 14, 3), answer="")
    for index in range(112)
)


def reward(prompt: Prompt, token_ids: Sequence[int]) -> float:
    """1 if right, else -1."""
    wanted = prompt.token_ids[0] % 2
    return 1.0 if sum(token != EOS and token % 2 == wanted for token in token_ids) >= NUM_WANTED else -1.0


def model_config(hidden_size: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=hidden_size // 2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        eos_token_id=EOS,
    )


def open_study_run(config: TrainConfig, *, seed: int, lag: int, actor_size: int, critic_size: int) -> TinyRun:
    """A run from fresh models: critics share their backbone's weights at the start, as pretrained ones do."""
    torch.manual_seed(seed)
    policy = Policy(Qwen3ForCausalLM(model_config(actor_size)).eval())
    backbone = Qwen3Model(model_config(critic_size)).eval()
    critics = []
    for _ in range(config.critic.count):
        own = Qwen3Model(model_config(critic_size)).eval()
        own.load_state_dict(backbone.state_dict())
        critics.append(Critic(own, new_value_head(critic_size, "float32", seed)))
    return TinyRun(
        config,
        policy=policy,
        critics=critics,
        prompts=PROMPTS,
        reward=reward,
        stop_token_ids=(EOS,),
        lag=lag,
    )
