"""What a run reads before anything is started: model folders, tokenizer, prompts, stop ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import ConfigError
from asyppo_async.fingerprint import ModelIdentity, model_identity
from asyppo_async.tasks.protocol import TaskSpec
from asyppo_async.tasks.registry import create_task
from asyppo_async.types import Prompt, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """Everything that is known without a process."""

    identity: ModelIdentity
    tokenizer: PreTrainedTokenizerBase
    task: TaskSpec
    train: Mapping[str, Prompt]
    """By prompt id."""
    heldout: tuple[Prompt, ...]
    sampling: SamplingParams

    @property
    def longest_prompt_tokens(self) -> int:
        return max(len(prompt.token_ids) for prompt in (*self.train.values(), *self.heldout))

    @property
    def longest_tokens(self) -> int:
        """Of a prompt and its response."""
        return self.longest_prompt_tokens + self.sampling.max_tokens

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a response, for scoring and reading only; special tokens are left out."""
        return str(
            self.tokenizer.decode(
                list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )


def read_material(config: TrainConfig) -> Material:
    """Read and check what the run stands on.

    Raises:
        ConfigError: A model folder is missing or not one, its critic has another tokenizer, or a prompt is longer
            than the model takes.
        TaskError: The task is unknown or has too few prompts.
    """
    check_model_folder(config.actor.model, "actor.model")
    identity = model_identity(config.actor.model)
    if config.critic.count > 0 and config.critic.model is not None:
        check_model_folder(config.critic.model, "critic.model")
        _check_critic(config.critic.model, config.actor.model, identity)
    tokenizer = load_tokenizer(config.actor.model)
    spec = TaskSpec(
        name=config.task.name,
        seed=config.run.seed,
        system_prompt=config.task.system_prompt or "",
        params=dict(config.task.params),
    )
    task = create_task(spec)
    material = Material(
        identity=identity,
        tokenizer=tokenizer,
        task=spec,
        train={prompt.id: prompt for prompt in task.prompts("train", config.task.num_train, tokenizer)},
        heldout=tuple(task.prompts("heldout", config.task.num_heldout, tokenizer)),
        sampling=SamplingParams(
            temperature=config.sampling.temperature,
            top_p=config.sampling.top_p,
            top_k=config.sampling.top_k,
            # A least length forbids the stop ids at first: that samples from another distribution than the policy.
            min_tokens=0,
            max_tokens=config.sampling.max_tokens,
            stop_token_ids=_stop_token_ids(identity, tokenizer, config.actor.model),
        ),
    )
    if material.longest_tokens > identity.max_positions:
        raise ConfigError(
            f"the longest prompt ({material.longest_prompt_tokens} tokens) and sampling.max_tokens "
            f"({material.sampling.max_tokens}) exceed the {identity.max_positions} tokens that "
            f"actor.model {config.actor.model} takes"
        )
    return material


def _check_critic(folder: Path, actor: Path, identity: ModelIdentity) -> None:
    critic = model_identity(folder)
    if (critic.tokenizer_fingerprint, critic.vocab_size) != (
        identity.tokenizer_fingerprint,
        identity.vocab_size,
    ):
        raise ConfigError(
            f"critic.model {folder} has another vocabulary than actor.model {actor} "
            f"({critic.vocab_size} against {identity.vocab_size} tokens, tokenizer {critic.tokenizer_fingerprint} "
            f"against {identity.tokenizer_fingerprint}): a critic reads the actor's token ids"
        )


def check_model_folder(folder: Path, key: str) -> None:
    """Raise `ConfigError` naming `key` unless `folder` holds a model with its weights."""
    if not folder.is_dir():
        raise ConfigError(f"{key}: there is no model folder {folder}")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{key}: {folder} is no model folder, it has no config.json")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{key}: {folder} has no *.safetensors weights")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder; nothing is fetched."""
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"actor.model: {folder} has no tokenizer that can be read: {error}") from None


def _stop_token_ids(
    identity: ModelIdentity, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> tuple[int, ...]:
    """The model's own end-of-text ids and the tokenizer's: chat models often name different ones."""
    ids = set(identity.eos_token_ids)
    if tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))
    if not ids:
        raise ConfigError(
            f"actor.model: {folder} names no end-of-text token in config.json, generation_config.json or its "
            "tokenizer, so no response could ever end"
        )
    return tuple(sorted(ids))
