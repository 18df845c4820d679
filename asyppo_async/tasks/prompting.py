"""From questions to prompts: the split, the templates, the ids."""

import hashlib
import json
from collections.abc import Iterable

from jinja2 import TemplateError

from asyppo_async.config.task import QUESTION
from asyppo_async.errors import TaskError
from asyppo_async.tasks.protocol import Message, PromptTokenizer, Split, TaskSpec
from asyppo_async.types import Prompt

_HELDOUT_ONE_IN = 5
"""Of the questions of a generator."""

Question = str | list[Message]
"""A text, or the turns of a chat of which the last is to be answered."""


def split_of(question: str) -> Split:
    """The split of a generated question, from its text alone: no seed and no count can move it to the other."""
    return "heldout" if _hash_of(question) % _HELDOUT_ONE_IN == 0 else "train"


def split_by_share(question: str, heldout_share: float) -> Split:
    """The split of a row, from its question alone; a larger share holds out what a smaller one does, and more."""
    return "heldout" if _hash_of(question) < heldout_share * 2**64 else "train"


def _hash_of(question: str) -> int:
    return int.from_bytes(hashlib.sha256(question.encode()).digest()[:8], "big")


def select_questions(
    questions: Iterable[tuple[str, str]], *, task: str, split: Split, num: int
) -> list[tuple[str, str]]:
    """The first `num` different `(question, answer)` pairs of the split.

    Raises:
        TaskError: `questions` ends before.
    """
    chosen: dict[str, str] = {}
    num_examined = 0
    for question, answer in questions:
        if len(chosen) >= num:
            break
        num_examined += 1
        if question not in chosen and split_of(question) == split:
            chosen[question] = answer
    if len(chosen) < num:
        raise TaskError(
            f"task {task} has only {len(chosen)} different {split} prompts among its {num_examined} questions, "
            f"{num} are wanted; ask for fewer or widen the task's params (reasoning_gym: also `size`)"
        )
    return list(chosen.items())


def key_of(question: Question) -> str:
    """What makes two questions the same."""
    return question if isinstance(question, str) else json.dumps(question, sort_keys=True)


def encode_prompt(
    tokenizer: PromptTokenizer, *, spec: TaskSpec, question: Question, answer: str, source: str = ""
) -> Prompt:
    """The prompt as the model reads it, through the templates.

    The id is made of the task's label and the question, so it is the same in every run, and so is the split.

    Raises:
        TaskError: a chat without a template, a template that refuses it, or no token for a part of the text.
    """
    place = f"task {spec.known_as}" + (f", {source}" if source else "")
    turns = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
    turns[-1] = {**turns[-1], "content": spec.prompt_template.replace(QUESTION, turns[-1]["content"])}
    text, is_chat = _text_of(tokenizer, turns, spec, place)
    begin = () if is_chat else _begin_of_text(tokenizer)
    token_ids = (*begin, *tokenizer.encode(text, add_special_tokens=False))
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in token_ids:
        raise TaskError(
            f"{place}: the tokenizer cannot write this prompt: {text!r:.300}; "
            "choose a task that fits the model's vocabulary, or another model"
        )
    digest = hashlib.sha256(key_of(question).encode()).hexdigest()[:16]
    return Prompt(
        id=f"{spec.known_as}/{digest}",
        task=spec.known_as,
        text=text,
        token_ids=token_ids,
        answer=answer,
        source=source,
    )


def _begin_of_text(tokenizer: PromptTokenizer) -> tuple[int, ...]:
    """What the model's own tokenizer puts before a bare text; a chat template writes it itself."""
    if tokenizer.bos_token_id is None:
        return ()
    added = tokenizer.encode("", add_special_tokens=True)
    return (tokenizer.bos_token_id,) if added[:1] == [tokenizer.bos_token_id] else ()


def _text_of(
    tokenizer: PromptTokenizer, turns: list[Message], spec: TaskSpec, place: str
) -> tuple[str, bool]:
    """The text, and whether a template made it."""
    own_template = None if spec.chat_template in ("auto", "none") else spec.chat_template
    if spec.chat_template == "none" or not (own_template or tokenizer.chat_template):
        if len(turns) > 1:
            raise TaskError(
                f"{place}: a prompt of several chat messages needs a chat template, and the tokenizer has none "
                "or task.chat_template is none; name a Jinja file with task.chat_template"
            )
        return spec.system_prompt + turns[0]["content"], False
    if spec.system_prompt and turns[0]["role"] != "system":
        turns = [{"role": "system", "content": spec.system_prompt}, *turns]
    chosen = {} if own_template is None else {"chat_template": own_template}
    try:
        # As text first: `encode` of that text is what every other tool makes of it, template quirks included.
        rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **chosen)
    except TemplateError as error:
        raise TaskError(f"{place}: the chat template refuses the prompt: {error}") from error
    return str(rendered), True
