"""Where prompts come from and how responses are scored: `[task]`, `[task.data]`, `[[task.mix]]`."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from asyppo_async.config.base import PositiveSeconds, Section

DATA = "data"
"""The task whose prompts are the rows of a data set."""
QUESTION = "{prompt}"
"""Where a prompt template takes the question."""


class DataSection(Section):
    """The rows of the task `data`, and the rule that scores responses to them."""

    path: Path | None = None
    """A `.jsonl` or `.parquet` file, or the folder of a Hugging Face data set (`save_to_disk`, or a copy of a hub
    repository); nothing is fetched."""
    split: str = "train"
    """Split of a Hugging Face data set that has several."""
    heldout_path: Path | None = None
    """Rows for evaluation. Rows of `path` with the same question are left out of training."""
    heldout_split: str = ""
    """Split for evaluation, of `heldout_path` or else of `path`; empty: none is named."""
    heldout_share: float = Field(default=0.1, gt=0, lt=1)
    """Share of the questions of `path` that is held out where neither a path nor a split for evaluation is given;
    which ones depends on their text alone."""
    prompt_column: str = "prompt"
    """Column of the question: text, or a list of chat messages `{role, content}`. `a.b` is a field within a field."""
    answer_column: str = "answer"
    """Column of the right answer; a reward function of your own does not need it."""
    answer_after: str = ""
    """Take the answer from behind the last occurrence of this text (`####` for GSM8K); empty: the whole of it."""
    reward: str = Field(default="math", pattern=r"^(math|exact|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")
    """`math`: the last box of the response, compared by math-verify. `exact`: the last box, compared as text.
    `MODULE:FUNCTION`: your own `function(row, response) -> score`, called in a child process."""
    score_range: Literal["0..1", "-1..1"] = "0..1"
    """Range of the scores of a function of your own. `0..1` becomes the reward R = 2 s - 1; `-1..1` is the reward."""
    bad_answers: Literal["refuse", "skip"] = "refuse"
    """A row whose answer the `math` rule does not verify against itself: refuse to start, or leave the row out."""


class PromptsSection(Section):
    """What a single task and an entry of a mix have in common."""

    name: str = "arithmetic"
    """`arithmetic`, `reasoning_gym:NAME`, `data` (rows of a file), or `custom:MODULE:CLASS`."""
    params: dict[str, int | float | str | bool] = Field(default_factory=dict)
    """Parameters of the task, as its own documentation names them."""
    data: DataSection = DataSection()
    """The rows, for `name = "data"`."""
    num_train: int = Field(default=10_000, ge=1)
    """Prompts of the training split; of `data` at most so many, the first ones."""
    num_heldout: int = Field(default=256, ge=1)
    """Prompts of the held-out split, disjoint from training; of `data` at most so many."""
    system_prompt: str | None = None
    """First message of a chat. Where no chat template is used it is put before the prompt."""
    prompt_template: str | None = None
    """Text around the question, which takes the place of `{prompt}`. None: the question alone, and for
    `reward = "math"` or `"exact"` the request to reason step by step and to box the final answer."""
    chat_template: str = "auto"
    """`auto`: the tokenizer's own; where it has none, `data` is refused and other tasks give the bare text.
    `none`: the bare text. Else a file with a Jinja template."""

    @field_validator("prompt_template")
    @classmethod
    def _has_a_place_for_the_question(cls, template: str | None) -> str | None:
        if template is not None and template.count(QUESTION) != 1:
            raise ValueError("a template names the place of the question once, as {prompt}")
        return template

    @model_validator(mode="after")
    def _data_belongs_to_the_task_data(self) -> Self:
        if self.name == DATA and self.data.path is None:
            raise ValueError("name = 'data' needs data.path, a .jsonl or .parquet file or a data set folder")
        if self.name != DATA and self.data != DataSection():
            raise ValueError(f"data.* is read by name = 'data' only, and name is {self.name!r}")
        if self.name == DATA and self.params:
            raise ValueError("name = 'data' has no params; its settings are data.*")
        return self


class MixSection(PromptsSection):
    """One task of several."""

    weight: float = Field(default=1.0, gt=0)
    """Share of the draws, relative to the other entries. An epoch of a task ends when each of its own prompts was
    drawn once, so small tasks see more epochs."""
    label: str = Field(default="", pattern=r"^[A-Za-z0-9:._-]*$")
    """Name in prompt ids and metrics; empty: `name`. Two entries of one name need labels."""


class TaskSection(PromptsSection):
    mix: tuple[MixSection, ...] = ()
    """Several tasks, drawn by weight, in place of the one that the other keys describe."""
    max_prompt_tokens: int = Field(default=0, ge=0)
    """Longer prompts are left out and counted; 0: what the model takes less `sampling.max_tokens`."""
    reward_processes: int = Field(default=1, ge=1)
    """Child processes that score responses."""
    reward_timeout_s: PositiveSeconds = 10
    """A response that is not scored in this time is a lost member of its group."""

    reward_memory_gib: float = Field(default=8, ge=0)
    """GiB that one of these processes may allocate; a score that needs more is a lost member. 0: no bound."""

    @property
    def reward_memory_bytes(self) -> int:
        return int(self.reward_memory_gib * 2**30)

    @property
    def entries(self) -> tuple[MixSection, ...]:
        """The tasks of the run: those of the mix, or the single one."""
        single = {key: getattr(self, key) for key in PromptsSection.model_fields}
        return self.mix or (MixSection(**single),)

    @model_validator(mode="after")
    def _mix_is_alone_and_its_labels_differ(self) -> Self:
        if not self.mix:
            return self
        set_beside = self.model_fields_set & PromptsSection.model_fields.keys()
        if set_beside and any(
            getattr(self, key) != PromptsSection.model_fields[key].get_default(call_default_factory=True)
            for key in set_beside
        ):
            raise ValueError(f"with [[task.mix]] each entry says its own {', '.join(sorted(set_beside))}")
        labels = [entry.label or entry.name for entry in self.mix]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"two entries of the mix are called {twice[0]!r}; give each a label of its own")
        return self
