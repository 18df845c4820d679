"""What a response states as its answer: nothing between think tags, and the last box."""

OPENED, CLOSED = "<think>", "</think>"
_BOX = "\\boxed"


def without_thoughts(text: str, *, opened: bool = False) -> str | None:
    """The response without what stands between think tags; None where it ends within a thought.

    Args:
        text: The response.
        opened: The prompt ended with an opening tag, so the response begins within a thought.
    """
    first_close, first_open = text.find(CLOSED), text.find(OPENED)
    # A template may have opened the thought without our seeing it: what stands before a lone closing tag was thought.
    if opened or (first_close >= 0 and not 0 <= first_open < first_close):
        text = OPENED + text
    kept: list[str] = []
    while True:
        before, tag, rest = text.partition(OPENED)
        kept.append(before)
        if not tag:
            return "".join(kept)
        _, tag, text = rest.partition(CLOSED)
        if not tag:
            return None


def thought_is_open(prompt_text: str) -> bool:
    """Whether a prompt leaves the model within a thought (templates of reasoning models end with the tag)."""
    return prompt_text.rstrip().endswith(OPENED)


def last_box(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`; None where there is none, it is empty, or a box is not closed.

    A box that is not closed makes the whole answer wrong: falling back to an earlier one would give credit for an
    answer that the response was about to replace.
    """
    content: str | None = None
    start = text.find(_BOX)
    while start >= 0:
        brace = start + len(_BOX)
        while text[brace : brace + 1].isspace():
            brace += 1
        end = _closing_brace(text, brace)
        if end is None:
            return None
        content = text[brace + 1 : end].strip()
        start = text.find(_BOX, end)
    if content is not None and _BOX in content:
        return last_box(content)
    return content or None


def _closing_brace(text: str, brace: int) -> int | None:
    """Where the group that opens at `brace` ends; None where none opens there or it does not end."""
    if text[brace : brace + 1] != "{":
        return None
    depth, position = 0, brace
    while position < len(text):
        match text[position]:
            case "\\":
                position += 1  # an escaped brace is a symbol
            case "{":
                depth += 1
            case "}":
                depth -= 1
                if depth == 0:
                    return position
            case _:
                pass
        position += 1
    return None


def final_answer(text: str, *, thought_open: bool = False) -> str | None:
    """The answer that counts: the last box outside of thoughts; None is a wrong answer."""
    said = without_thoughts(text, opened=thought_open)
    return None if said is None else last_box(said)
