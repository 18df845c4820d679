"""The seams of a task: where prompts come from, and how a response is scored.

Torch-free and transformers-free: the children that score import these modules and nothing heavier.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from asyppo_async.config.task import QUESTION
from asyppo_async.types import Prompt

Split = Literal["train", "heldout"]

JsonValue = bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """What the user says about a task; enough to build it again in another process."""

    name: str
    """`arithmetic`, `reasoning_gym:NAME`, `data` or `custom:MODULE:CLASS`."""
    seed: int
    """Chooses the prompts; which of them are held out does not depend on it."""
    system_prompt: str
    """First message of a chat; empty for none. Without a chat template it is put before the prompt."""
    params: Mapping[str, JsonValue]
    """Settings of the task itself; an unknown one is an error. Of `data`: its section."""
    label: str = ""
    """What tells it from the other tasks of a mix, in prompt ids and metrics; empty: its name."""
    prompt_template: str = QUESTION
    """Text around a question."""
    chat_template: str = "auto"
    """`auto`, `none`, or the text of a Jinja template."""

    @property
    def known_as(self) -> str:
        return self.label or self.name


Message = dict[str, str]
"""One turn of a chat: `role` and `content`."""


class PromptTokenizer(Protocol):
    """The part of a transformers tokenizer that prompts need."""

    @property
    def chat_template(self) -> object:
        """A template, or None where the model has none."""

    @property
    def unk_token_id(self) -> int | None:
        """The id of what the vocabulary cannot write, or None."""

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, or None."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def apply_chat_template(
        self,
        conversation: list[Message],
        chat_template: str | None = None,
        *,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> object:
        """With `tokenize=False`, the text that the model reads."""


class Task(Protocol):
    """A source of prompts, and the judge of the responses to them."""

    @property
    def name(self) -> str: ...

    def prompts(self, split: Split, num: int, tokenizer: PromptTokenizer) -> list[Prompt]:
        """`num` different prompts; those of a smaller `num` are the first of a larger one.

        No text of one split is in the other.

        Raises:
            TaskError: there are fewer, or the tokenizer cannot write one.
        """

    def score(self, prompt: Prompt, text: str) -> float:
        """The reward of a response in [-1, 1]: R = 2s - 1 of a score s in [0, 1].

        Runs in a child process under a deadline; whatever it raises is a failed score, never a reward of 0.
        """
