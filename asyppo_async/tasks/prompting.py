"""From questions to prompts: the split, the chat template, the ids."""

import hashlib
from collections.abc import Iterable

from asyppo_async.errors import TaskError
from asyppo_async.tasks.protocol import PromptTokenizer, Split
from asyppo_async.types import Prompt

_HELDOUT_ONE_IN = 5


def split_of(question: str) -> Split:
    """The split of a question, from its text alone: no seed and no count can move it to the other."""
    digest = hashlib.sha256(question.encode()).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") % _HELDOUT_ONE_IN == 0 else "train"


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


def encode_prompt(
    tokenizer: PromptTokenizer, *, task: str, system_prompt: str, question: str, answer: str
) -> Prompt:
    """The prompt as the model reads it, through the chat template where the tokenizer has one.

    The id is made of the task's name and the question, so it is the same in every run, and so is the split.

    Raises:
        TaskError: the tokenizer has no token for a part of the text.
    """
    if tokenizer.chat_template:
        messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        messages.append({"role": "user", "content": question})
        # As text first: `encode` of that text is what every other tool makes of it, template quirks included.
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    else:
        text = system_prompt + question
    token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in token_ids:
        raise TaskError(
            f"the tokenizer cannot write this prompt of task {task}: {text!r}; "
            "choose a task that fits the model's vocabulary, or another model"
        )
    digest = hashlib.sha256(question.encode()).hexdigest()[:16]
    return Prompt(id=f"{task}/{digest}", task=task, text=text, token_ids=token_ids, answer=answer)
