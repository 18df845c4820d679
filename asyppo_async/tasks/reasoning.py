"""Every generator of the library `reasoning_gym`, with its own scorer."""

import dataclasses
import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

from asyppo_async.errors import TaskError
from asyppo_async.tasks.exact_json import dump_exact, load_exact
from asyppo_async.tasks.params import nearest, refuse_unknown
from asyppo_async.tasks.prompting import encode_prompt, select_questions
from asyppo_async.tasks.protocol import JsonValue, PromptTokenizer, Split, TaskSpec
from asyppo_async.tasks.stated import last_box, thought_is_open, without_thoughts
from asyppo_async.types import Prompt

PREFIX = "reasoning_gym:"

_SIZE = 10_000
"""Questions of a data set unless the params say `size`. Fixed, because some generators draw by it."""

_TAGGED_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class _DataSet(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, idx: int) -> Mapping[str, object]: ...

    def score_answer(self, answer: str, entry: Mapping[str, object]) -> float: ...


class _Library(Protocol):
    def create_dataset(self, name: str, **params: JsonValue) -> _DataSet: ...


class _Factory(Protocol):
    DATASETS: Mapping[str, tuple[type, type]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningGymTask:
    """One generator of the library."""

    spec: TaskSpec
    data_set: _DataSet

    @property
    def name(self) -> str:
        return self.spec.known_as

    @classmethod
    def from_spec(cls, spec: TaskSpec) -> "ReasoningGymTask":
        """
        Raises:
            TaskError: no such generator, or it refuses the params.
        """
        generator = spec.name.removeprefix(PREFIX)
        # Imported here and not at the top: it takes most of a second, and only these tasks need it.
        known = cast(_Factory, importlib.import_module("reasoning_gym.factory")).DATASETS
        if generator not in known:
            raise TaskError(f"reasoning_gym has no generator {generator!r}; {nearest(generator, known)}")
        fields = {field.name for field in dataclasses.fields(known[generator][1])}
        refuse_unknown(spec, known=fields - {"seed"})
        params: dict[str, JsonValue] = {"size": _SIZE, **spec.params, "seed": spec.seed}
        library = cast(_Library, importlib.import_module("reasoning_gym"))
        try:
            data_set = library.create_dataset(generator, **params)
        except (AssertionError, ValueError, TypeError) as error:
            raise TaskError(f"reasoning_gym refuses the params of {generator}: {params}: {error}") from error
        return cls(spec=spec, data_set=data_set)

    def prompts(self, split: Split, num: int, tokenizer: PromptTokenizer) -> list[Prompt]:
        chosen = select_questions(self._questions(), task=self.name, split=split, num=num)
        return [
            encode_prompt(tokenizer, spec=self.spec, question=question, answer=answer)
            for question, answer in chosen
        ]

    def score(self, prompt: Prompt, text: str) -> float:
        """The library's score in [0, 1] of what the response states outside of thoughts."""
        entry = cast(Mapping[str, object], load_exact(prompt.answer))
        said = without_thoughts(text, opened=thought_is_open(prompt.text))
        return (
            -1.0
            if said is None
            else 2.0 * float(self.data_set.score_answer(stated_answer(said), entry)) - 1.0
        )

    def _questions(self) -> Iterator[tuple[str, str]]:
        for index in range(len(self.data_set)):
            entry = self.data_set[index]
            yield str(entry["question"]), dump_exact(dict(entry))


def stated_answer(text: str) -> str:
    """The last `<answer>` of a response, else its last box, else the whole of it."""
    tagged = _TAGGED_ANSWER.findall(text)
    if not tagged and "\\boxed" in text:
        return last_box(text) or ""
    return (tagged[-1] if tagged else text).strip()
