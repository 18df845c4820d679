r"""Whether a boxed answer is the right one, by math-verify, in a process that may be killed.

An answer such as `9^{9^{9}}` computes for ever and holds the interpreter, so the library's own time limits, which
need signals in the main thread and turn a late answer into a wrong one, are off: the caller kills this process.
"""

import importlib
import logging
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Protocol, cast

from asyppo_async.tasks.stated import last_box

_NUMBER = re.compile(r"[+-]?[0-9]+(?:\.[0-9]+)?")
_RATIO = re.compile(r"(?:\\d?frac)?\{?([+-]?[0-9]{1,40})\}?(?:/|(?<=\})\{)\{?([0-9]{1,40})\}?")
_WORDS = re.compile(r"(?:\\(?:text|mathrm|textbf|mathbf)\{)?([A-Za-z]{3,}(?: [A-Za-z]+)*)[.}]*")


class _Library(Protocol):
    parse: Callable[..., list[object]]
    verify: Callable[..., bool]


def is_right(gold: str, stated: str) -> bool:
    """Whether `stated` means the same as `gold`, both without their boxes.

    math-verify compares anagrams as equal (letters are factors) and numbers to six decimals, so that 1/2^99 equals
    1/2^98; words and exact ratios are therefore compared as what they are.
    """
    if _plain(gold) == _plain(stated):
        return True
    gold_words, stated_words = _WORDS.fullmatch(gold.strip()), _WORDS.fullmatch(stated.strip())
    if gold_words is not None and stated_words is not None:
        return gold_words[1].casefold() == stated_words[1].casefold()
    return verifies(gold, stated)


def verifies(gold: str, stated: str) -> bool:
    """The library's own verdict; the order matters, an interval is satisfied by an inequality and not vice versa."""
    library = _library()
    parsed_gold, parsed = list(_parsed(gold)), list(_parsed(stated))
    return bool(parsed_gold and parsed) and bool(
        library.verify(parsed_gold, parsed, timeout_seconds=None) and not _exactly_unequal(gold, stated)
    )


def warm_up() -> None:
    """Import and build what the first comparison of each kind needs, so that no response is charged for it."""
    for gold, stated in (("1/2", "0.5"), ("x^2-1", "(x-1)(x+1)")):
        verifies(gold, stated)


def is_plain_number(gold: str) -> bool:
    """Whether a right answer needs no check: the library reads every such number."""
    return _NUMBER.fullmatch(gold) is not None


def can_be_verified(gold: str) -> bool:
    """Whether the library understands a right answer, as more than a string, and takes it for its own equal."""
    if is_plain_number(gold) or _WORDS.fullmatch(gold.strip()):
        return True
    return any(not isinstance(part, str) for part in _parsed(gold)) and verifies(gold, gold)


def clean_gold(gold: str) -> str:
    r"""A right answer as data sets write it (`\boxed{7}` at the end of a solution, `$7$`), without its wrapping."""
    gold = gold.strip()
    if "\\boxed" in gold:
        return last_box(gold) or ""
    while len(gold) > 1 and gold.startswith("$") and gold.endswith("$"):
        gold = gold[1:-1].strip()
    return gold


def _plain(text: str) -> str:
    return "".join(text.split()).replace("\\!", "").replace("\\,", "")


def _exactly_unequal(gold: str, stated: str) -> bool:
    ratios = [_ratio(text) for text in (gold, stated)]
    return None not in ratios and ratios[0] != ratios[1]


def _ratio(text: str) -> Fraction | None:
    """The value of `7`, `-3/4`, `1/2^{99}` or `\\frac{3}{4}`; None of everything else."""
    text = _plain(text)
    if re.fullmatch(r"[+-]?[0-9]{1,40}", text):
        return Fraction(int(text))
    match = _RATIO.fullmatch(text)
    if match is not None:
        return Fraction(int(match[1]), int(match[2])) if int(match[2]) else None
    power = re.fullmatch(r"([+-]?[0-9]{1,6})/([0-9]{1,6})\^\{?([0-9]{1,3})\}?", text)
    if power is not None:
        return Fraction(int(power[1]), int(power[2]) ** int(power[3])) if int(power[2]) else None
    return None


@lru_cache(maxsize=4096)
def _parsed(text: str) -> tuple[object, ...]:
    # In a box, which the library reads first and whole; a bare answer may be taken for something else.
    return tuple(_library().parse(f"\\boxed{{{text}}}", parsing_timeout=None))


@lru_cache(maxsize=1)
def _library() -> _Library:
    # Imported here and not at the top: sympy takes a second, and other tasks do not need it.
    library = importlib.import_module("math_verify")
    logging.getLogger("math_verify").setLevel(
        logging.ERROR
    )  # it warns at each call that its time limits are off
    return cast(_Library, library)
