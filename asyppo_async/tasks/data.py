"""The task `data`: prompts from the rows of a data set, and a rule that scores the boxed answer or calls the user."""

import importlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import cast

from asyppo_async.config.task import DataSection
from asyppo_async.errors import TaskError
from asyppo_async.tasks.mathematics import can_be_verified, clean_gold, is_right, warm_up
from asyppo_async.tasks.prompting import Question, encode_prompt, key_of, split_by_share
from asyppo_async.tasks.protocol import JsonValue, Message, PromptTokenizer, Split, TaskSpec
from asyppo_async.tasks.rows import Row, read_rows
from asyppo_async.tasks.stated import final_answer, thought_is_open
from asyppo_async.types import Prompt

_log = logging.getLogger(__name__)

BOXED = "{prompt}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
"""The template of rows whose answer is read from a box."""

RewardFunction = Callable[[Mapping[str, JsonValue], str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTask:
    """Rows of a data set."""

    spec: TaskSpec
    section: DataSection
    function: RewardFunction | None
    """The user's own, loaded in scoring processes only."""

    @classmethod
    def from_spec(cls, spec: TaskSpec, *, scoring: bool) -> "DataTask":
        """
        Raises:
            TaskError: the reward function cannot be loaded.
        """
        section = DataSection.model_validate(dict(spec.params))
        if not scoring:
            return cls(spec=spec, section=section, function=None)
        if section.reward == "math":
            warm_up()
        return cls(
            spec=spec,
            section=section,
            function=load_function(section.reward) if ":" in section.reward else None,
        )

    @property
    def name(self) -> str:
        return self.spec.known_as

    def prompts(self, split: Split, num: int, tokenizer: PromptTokenizer) -> list[Prompt]:
        """At most `num`, in the order of the rows; a question that comes again is left out.

        Raises:
            TaskError: a row is broken, there are none, or the tokenizer has no chat template; with file and line.
        """
        if self.spec.chat_template == "auto" and not tokenizer.chat_template:
            raise TaskError(
                f"task {self.name}: the tokenizer has no chat template; name a Jinja file with task.chat_template, "
                'or give the model the bare text with task.chat_template = "none"'
            )
        made: dict[str, Prompt] = {}
        num_repeated = 0
        for row, question in self._rows(split):
            if len(made) >= num:
                break
            prompt = encode_prompt(
                tokenizer, spec=self.spec, question=question, answer=self._answer(row), source=row.place
            )
            num_repeated += prompt.id in made
            made.setdefault(prompt.id, prompt)
        if not made:
            raise TaskError(
                f"task {self.name} has no {split} rows: none of {self.section.path} falls to that split; "
                "give data.heldout_path, data.heldout_split or another data.heldout_share"
            )
        if num_repeated:
            _log.warning(
                "task %s: %d %s rows repeat a question and are left out", self.name, num_repeated, split
            )
        return list(made.values())

    def score(self, prompt: Prompt, text: str) -> float:
        """R = 2 s - 1 of a right (1) or wrong (0) answer, or of what the user's function gives."""
        if self.function is not None:
            row = cast(dict[str, JsonValue], json.loads(prompt.answer))
            return self._reward_of(self.function(row, text))
        stated = final_answer(text, thought_open=thought_is_open(prompt.text))
        return 1.0 if stated is not None and self._is_right(prompt.answer, stated) else -1.0

    def _is_right(self, gold: str, stated: str) -> bool:
        return is_right(gold, stated) if self.section.reward == "math" else gold == " ".join(stated.split())

    def _reward_of(self, score: object) -> float:
        lowest = 0.0 if self.section.score_range == "0..1" else -1.0
        if not isinstance(score, Real) or not math.isfinite(score) or not lowest <= float(score) <= 1.0:
            raise TaskError(
                f"{self.section.reward} must return a finite number in {self.section.score_range}, got "
                f"{type(score).__name__} {score!r:.200}"
            )
        return 2.0 * float(score) - 1.0 if lowest == 0.0 else float(score)

    def _rows(self, split: Split) -> Iterator[tuple[Row, Question]]:
        section = self.section
        assert section.path is not None
        if not section.heldout_path and not section.heldout_split:
            for row, question in self._questions(section, heldout=False):
                if split_by_share(key_of(question), section.heldout_share) == split:
                    yield row, question
            return
        if split == "heldout":
            yield from self._questions(section, heldout=True)
            return
        heldout = {key_of(question) for _, question in self._questions(section, heldout=True)}
        num_shared = 0
        for row, question in self._questions(section, heldout=False):
            if key_of(question) in heldout:
                num_shared += 1
            else:
                yield row, question
        if num_shared:
            _log.warning("task %s: %d held-out questions are left out of training", self.name, num_shared)

    def _questions(self, section: DataSection, *, heldout: bool) -> Iterator[tuple[Row, Question]]:
        path, split, key = section.path, section.split, "data.path"
        if heldout:
            split = section.heldout_split or section.split
            if section.heldout_path is not None:
                path, key = section.heldout_path, "data.heldout_path"
        assert path is not None
        for row in read_rows(path, split, key):
            yield row, _question(row, section.prompt_column)

    def _answer(self, row: Row) -> str:
        """What `score` needs of the row."""
        if ":" in self.section.reward:
            return row.document()
        value = row.field(self.section.answer_column)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise TaskError(
                f"{row.place}: column {self.section.answer_column!r} must be a text or a number, got {value!r:.100}"
            )
        text = str(value)
        if self.section.answer_after:
            text = text.rpartition(self.section.answer_after)[2]
        answer = clean_gold(text) if self.section.reward == "math" else " ".join(text.split())
        if not answer:
            raise TaskError(
                f"{row.place}: column {self.section.answer_column!r} holds no answer: {value!r:.100}"
            )
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersTask:
    """The rows' own answers as responses: a reward of 1 where the `math` rule takes an answer for its own equal.

    A task, so that it runs where responses are scored: an answer of the data set may compute for ever too.
    """

    spec: TaskSpec

    @property
    def name(self) -> str:
        return self.spec.known_as

    def prompts(self, split: Split, num: int, tokenizer: PromptTokenizer) -> list[Prompt]:
        raise TaskError("answers are checked, not asked for")

    def score(self, prompt: Prompt, text: str) -> float:
        return 1.0 if can_be_verified(text) else -1.0


def _question(row: Row, column: str) -> Question:
    value = row.field(column)
    if isinstance(value, str) and value.strip():
        return value
    turns: list[Message] = []
    for turn in value if isinstance(value, list) else []:
        if not isinstance(turn, Mapping) or not all(
            isinstance(turn.get(key), str) for key in ("role", "content")
        ):
            break
        turns.append({"role": turn["role"], "content": turn["content"]})
    if not turns or not isinstance(value, list) or len(turns) < len(value):
        raise TaskError(
            f"{row.place}: column {column!r} must be a text or a list of messages {{role, content}}, got {value!r:.100}"
        )
    return turns


def load_function(name: str) -> RewardFunction:
    """The function of `MODULE:FUNCTION`.

    Raises:
        TaskError: it cannot be imported, or is no function.
    """
    module_name, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:
        # Foreign code runs at import: whatever it raises is why the name cannot be used.
        raise TaskError(
            f"reward {name!r} cannot be loaded: {type(error).__name__}: {error}; it must be MODULE:FUNCTION with the "
            "module in the current folder or on PYTHONPATH"
        ) from error
    if not callable(function):
        raise TaskError(f"reward {name!r} is no function but {type(function).__name__}")
    return cast(RewardFunction, function)
