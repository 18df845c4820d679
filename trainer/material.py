"""What a run reads before anything is started: model folders, tokenizer, prompts, stop ids."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import ConfigError
from asyppo_async.fingerprint import ModelIdentity, model_identity
from asyppo_async.tasks.protocol import TaskSpec
from asyppo_async.tasks.stated import CLOSED, OPENED
from asyppo_async.trainer.coordinator.mixed_sampler import TaskShare
from asyppo_async.trainer.critic_folder import critic_folders
from asyppo_async.trainer.prompts import TaskPrompts, check_answers, interleaved, read_prompts, task_specs
from asyppo_async.types import Prompt, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """Everything that is known without a process."""

    identity: ModelIdentity
    tokenizer: PreTrainedTokenizerBase
    tasks: tuple[TaskPrompts, ...]
    sampling: SamplingParams
    train: Mapping[str, Prompt] = field(init=False)
    """By prompt id."""
    heldout: tuple[Prompt, ...] = field(init=False)
    unspoken_ids: frozenset[int] = field(init=False)
    """Special tokens but for think tags, which decide what is scored."""

    def __post_init__(self) -> None:
        # Made once, not at each access: a data set has millions of rows.
        train = {prompt.id: prompt for task in self.tasks for prompt in task.train}
        object.__setattr__(self, "train", train)
        object.__setattr__(self, "heldout", interleaved(self.tasks))
        added = self.tokenizer.added_tokens_decoder.items()
        special = {*self.tokenizer.all_special_ids, *(token_id for token_id, token in added if token.special)}
        tags = set(self.tokenizer.convert_tokens_to_ids([OPENED, CLOSED]))
        object.__setattr__(self, "unspoken_ids", frozenset(special - tags))

    @property
    def specs(self) -> tuple[TaskSpec, ...]:
        return tuple(task.spec for task in self.tasks)

    @property
    def shares(self) -> tuple[TaskShare, ...]:
        return tuple(task.share for task in self.tasks)

    @property
    def longest_prompt_tokens(self) -> int:
        return max(len(prompt.token_ids) for prompt in (*self.train.values(), *self.heldout))

    @property
    def longest_tokens(self) -> int:
        """Of a prompt and its response."""
        return self.longest_prompt_tokens + self.sampling.max_tokens

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a response, for scoring and reading only; special tokens are left out, but for think tags.

        Raises:
            ValueError: The actor has no such token.
        """
        for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token_id < self.identity.vocab_size:
                raise ValueError(
                    f"token id {token_id} is not in the actor's vocabulary of {self.identity.vocab_size}"
                )
        kept = [token_id for token_id in token_ids if token_id not in self.unspoken_ids]
        return str(self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))


async def open_material(config: TrainConfig) -> Material:
    """`read_material`, and the check of the right answers of its rows, in child processes.

    Raises:
        ConfigError, TaskError: As `read_material`, or an answer cannot be verified.
    """
    material = await asyncio.to_thread(read_material, config)
    return replace(
        material, tasks=await check_answers(material.tasks, config.task, config.run.join_timeout_s)
    )


def read_material(config: TrainConfig) -> Material:
    """Read and check what the run stands on.

    Raises:
        ConfigError: A model folder is missing or not one, its critic has another tokenizer, or a response alone is
            longer than the model takes.
        TaskError: A task is unknown, its data are broken, or it has too few prompts.
    """
    check_model_folder(config.actor.model, "actor.model")
    identity = model_identity(config.actor.model)
    for folder in sorted(set(critic_folders(config.critic))):
        check_model_folder(folder, "critic.model")
        _check_critic(folder, config.actor.model, identity)
    tokenizer = load_tokenizer(config.actor.model)
    max_prompt_tokens = _max_prompt_tokens(config, identity)
    specs = task_specs(config.task, config.run.seed)
    return Material(
        identity=identity,
        tokenizer=tokenizer,
        tasks=read_prompts(config.task, specs, tokenizer, max_prompt_tokens),
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


def _max_prompt_tokens(config: TrainConfig, identity: ModelIdentity) -> int:
    """The longest prompt that leaves room for a response."""
    taken, by = identity.max_positions, f"actor.model {config.actor.model}"
    if not config.fleet.servers and 0 < config.fleet.max_model_len < taken:
        taken, by = config.fleet.max_model_len, "fleet.max_model_len"
    room, asked = taken - config.sampling.max_tokens, config.task.max_prompt_tokens
    if max(asked, 1) > room:
        raise ConfigError(
            f"sampling.max_tokens ({config.sampling.max_tokens}) and a prompt of {max(asked, 1)} tokens"
            f"{' (task.max_prompt_tokens)' if asked else ''} exceed the {taken} tokens that {by} takes"
        )
    return asked or room


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
