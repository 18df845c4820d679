"""The prompts of a run: made by its tasks, bounded in length, their right answers checked."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from asyppo_async.config.task import DATA, QUESTION, MixSection, TaskSection
from asyppo_async.errors import ConfigError, TaskError
from asyppo_async.tasks.data import BOXED
from asyppo_async.tasks.mathematics import is_plain_number
from asyppo_async.tasks.protocol import JsonValue, PromptTokenizer, Split, TaskSpec
from asyppo_async.tasks.registry import ANSWERS, create_task
from asyppo_async.trainer.coordinator.mixed_sampler import TaskShare
from asyppo_async.trainer.coordinator.rewards import RewardPool, Scored
from asyppo_async.types import Prompt

_CHECKED_AT_ONCE = 500
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPrompts:
    """The prompts of one task."""

    section: MixSection
    spec: TaskSpec
    train: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...]
    left_out: Mapping[str, int]
    """Prompts that were left out, by reason."""

    @property
    def share(self) -> TaskShare:
        return TaskShare(
            label=self.spec.known_as,
            weight=self.section.weight,
            prompt_ids=tuple(prompt.id for prompt in self.train),
        )

    @property
    def reward_map(self) -> str:
        """How a score became a reward, for the summary."""
        section = self.section
        if section.name.startswith("custom:") or (
            section.name == DATA and ":" in section.data.reward and section.data.score_range == "-1..1"
        ):
            return "R = s of a score s in [-1, 1]"
        return "R = 2 s - 1 of a score s in [0, 1]"

    def __str__(self) -> str:
        left_out = "".join(f", {count} left out ({reason})" for reason, count in self.left_out.items())
        return (
            f"task {self.spec.known_as}: {len(self.train)} prompts, {len(self.heldout)} held out{left_out}; "
            f"{self.reward_map}"
        )

    def row(self) -> dict[str, object]:
        """For the summary."""
        return {
            "train": len(self.train),
            "heldout": len(self.heldout),
            "left_out": dict(self.left_out),
            "reward": self.reward_map,
        }


def task_specs(section: TaskSection, seed: int) -> list[TaskSpec]:
    """What each task of the run is built from, in every process.

    Raises:
        ConfigError: a chat template cannot be read.
    """
    return [
        TaskSpec(
            name=entry.name,
            seed=seed,
            system_prompt=entry.system_prompt or "",
            params=_params_of(entry),
            label=entry.label,
            prompt_template=entry.prompt_template or _default_template(entry),
            chat_template=_chat_template(entry.chat_template),
        )
        for entry in section.entries
    ]


def read_prompts(
    section: TaskSection, specs: Sequence[TaskSpec], tokenizer: PromptTokenizer, max_tokens: int
) -> tuple[TaskPrompts, ...]:
    """Make the prompts of every task, and leave out those of more than `max_tokens` tokens.

    Raises:
        TaskError: a task cannot make its prompts, or all of a split are too long.
    """
    made: list[TaskPrompts] = []
    for entry, spec in zip(section.entries, specs, strict=True):
        task = create_task(spec)
        left_out: Counter[str] = Counter()
        splits: dict[Split, tuple[Prompt, ...]] = {}
        numbers: tuple[tuple[Split, int], ...] = (("train", entry.num_train), ("heldout", entry.num_heldout))
        for split, num in numbers:
            prompts = task.prompts(split, num, tokenizer)
            splits[split] = tuple(prompt for prompt in prompts if len(prompt.token_ids) <= max_tokens)
            if len(splits[split]) < len(prompts):
                left_out[f"longer than {max_tokens} tokens"] += len(prompts) - len(splits[split])
            if not splits[split]:
                shortest = min(len(prompt.token_ids) for prompt in prompts)
                raise TaskError(
                    f"task {spec.known_as}: all {len(prompts)} {split} prompts are longer than {max_tokens} tokens, "
                    f"the shortest has {shortest}; use a model that takes more, less sampling.max_tokens, or a higher "
                    "task.max_prompt_tokens"
                )
        made.append(
            TaskPrompts(
                section=entry, spec=spec, train=splits["train"], heldout=splits["heldout"], left_out=left_out
            )
        )
    return tuple(made)


async def check_answers(
    tasks: Sequence[TaskPrompts], section: TaskSection, start_deadline_s: float
) -> tuple[TaskPrompts, ...]:
    """Refuse or leave out the rows whose right answer the verifier does not take for its own equal.

    Raises:
        TaskError: there are such rows, and the task does not say to leave them out; with file and line.
    """
    return tuple([await _check(task, section, start_deadline_s) for task in tasks])


async def _check(task: TaskPrompts, section: TaskSection, start_deadline_s: float) -> TaskPrompts:
    data = task.section.data
    if task.section.name != DATA or data.reward != "math":
        return task
    doubtful = [prompt for prompt in (*task.train, *task.heldout) if not is_plain_number(prompt.answer)]
    if not doubtful:
        return task
    pool = RewardPool(
        specs=(replace(task.spec, name=ANSWERS, label=task.spec.known_as),),
        num_children=section.reward_processes,
        score_deadline_s=section.reward_timeout_s,
        start_deadline_s=start_deadline_s,
        memory_bytes=section.reward_memory_bytes,
    )
    bad: list[Prompt] = []
    async with pool:
        for start in range(0, len(doubtful), _CHECKED_AT_ONCE):
            some = doubtful[start : start + _CHECKED_AT_ONCE]
            outcomes = await asyncio.gather(*(pool.score(prompt, prompt.answer) for prompt in some))
            bad += [prompt for prompt, out in zip(some, outcomes, strict=True) if out != Scored(value=1.0)]
    if bad and data.bad_answers == "refuse":
        shown = ", ".join(f"{prompt.source} ({prompt.answer!r:.60})" for prompt in bad[:_SHOWN])
        more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise TaskError(
            f"task {task.spec.known_as}: math-verify does not take the answer of these rows for its own equal: "
            f'{shown}{more}; correct them, or leave them out with data.bad_answers = "skip"'
        )
    return _without(task, {prompt.id for prompt in bad})


def _without(task: TaskPrompts, ids: set[str]) -> TaskPrompts:
    if not ids:
        return task
    train, heldout = (
        tuple(prompt for prompt in prompts if prompt.id not in ids) for prompts in (task.train, task.heldout)
    )
    if not train or not heldout:
        raise TaskError(f"task {task.spec.known_as}: no row is left whose answer math-verify can check")
    reason = "answer not verified against itself"
    return replace(task, train=train, heldout=heldout, left_out={**task.left_out, reason: len(ids)})


def interleaved(tasks: Iterable[TaskPrompts]) -> tuple[Prompt, ...]:
    """The held-out prompts, so that the first ones are of all tasks."""
    queues = [list(reversed(task.heldout)) for task in tasks]
    merged: list[Prompt] = []
    while any(queues):
        merged += [queue.pop() for queue in queues if queue]
    return tuple(merged)


def _params_of(entry: MixSection) -> dict[str, JsonValue]:
    return entry.data.model_dump(mode="json") if entry.name == DATA else dict(entry.params)


def _default_template(entry: MixSection) -> str:
    return BOXED if entry.name == DATA and entry.data.reward in ("math", "exact") else QUESTION


def _chat_template(setting: str) -> str:
    if setting in ("auto", "none"):
        return setting
    try:
        return Path(setting).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"task.chat_template: {setting} cannot be read: {error}") from None
