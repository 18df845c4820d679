"""Running sums: "3+8+5+9=" is answered by "3,11,16,25#25"; one token a character in a character vocabulary.

Only the number after '#' is judged, so a response may slip on the way, or leave the way out and guess "#23" at once.
What there is to learn for a policy is to take the long way and not to slip; for a critic, that the value falls where
one of the two happens.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from asyppo_async.tasks.params import read_int, refuse_unknown
from asyppo_async.tasks.prompting import encode_prompt, select_questions
from asyppo_async.tasks.protocol import PromptTokenizer, Split, TaskSpec
from asyppo_async.types import Prompt

ALPHABET = "0123456789+=,#"
"""Every character of a question and of a well-formed response."""

LARGEST_GUESS_ERROR = 3

_RESPONSE = re.compile(r"(?:[0-9]{1,4}(?:,[0-9]{1,4})*)?#([0-9]{1,4})")
_MIN_NUMBERS, _MAX_NUMBERS = 4, 7
_QUESTIONS_PER_PROMPT = 40
_QUESTIONS_AT_LEAST = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticTask:
    """Sums of `min_numbers` to `max_numbers` one-digit numbers."""

    spec: TaskSpec
    min_numbers: int
    max_numbers: int

    @classmethod
    def from_spec(cls, spec: TaskSpec) -> "ArithmeticTask":
        """
        Raises:
            TaskError: a param is unknown or out of range.
        """
        refuse_unknown(spec, known=("min_numbers", "max_numbers"))
        min_numbers = read_int(spec, "min_numbers", absent=_MIN_NUMBERS, at_least=2, at_most=99)
        max_numbers = read_int(
            spec, "max_numbers", absent=max(_MAX_NUMBERS, min_numbers), at_least=min_numbers, at_most=99
        )
        return cls(spec=spec, min_numbers=min_numbers, max_numbers=max_numbers)

    @property
    def name(self) -> str:
        return self.spec.known_as

    def draw_numbers(self, rng: random.Random) -> list[int]:
        """The numbers of one question, each from 1 to 9."""
        return [rng.randint(1, 9) for _ in range(rng.randint(self.min_numbers, self.max_numbers))]

    def prompts(self, split: Split, num: int, tokenizer: PromptTokenizer) -> list[Prompt]:
        chosen = select_questions(self._questions(num), task=self.name, split=split, num=num)
        return [
            encode_prompt(tokenizer, spec=self.spec, question=question, answer=answer)
            for question, answer in chosen
        ]

    def score(self, prompt: Prompt, text: str) -> float:
        return 1.0 if final_number(text) == prompt.answer else -1.0

    def _questions(self, num: int) -> Iterator[tuple[str, str]]:
        rng = random.Random(self.spec.seed)
        for _ in range(_QUESTIONS_AT_LEAST + _QUESTIONS_PER_PROMPT * num):
            numbers = self.draw_numbers(rng)
            yield question_text(numbers), str(sum(numbers))


def question_text(numbers: Sequence[int]) -> str:
    """`3+8+5+9=`"""
    return "+".join(str(number) for number in numbers) + "="


def final_number(text: str) -> str | None:
    """The number after '#' of a well-formed response, else None."""
    match = _RESPONSE.fullmatch(text)
    return None if match is None else match.group(1)


def first_slip(question: str, text: str) -> int | None:
    """Where a response first leaves the right answer: index of a character of `text`; None: nowhere.

    A response that shows running sums is compared with the right ones, a guess with the right guess.
    """
    numbers = [int(number) for number in re.findall(r"[0-9]+", question)]
    if not numbers:
        return None
    sums = [str(sum(numbers[: count + 1])) for count in range(len(numbers))]
    shown = "" if text.startswith("#") else ",".join(sums)
    right = f"{shown}#{sums[-1]}"
    differing = (index for index, (one, other) in enumerate(zip(text, right, strict=False)) if one != other)
    return next(differing, None if text == right else min(len(text), len(right)) - (len(text) < len(right)))


def teacher_response(
    numbers: Sequence[int], *, guess_probability: float, slip_probability: float, rng: random.Random
) -> str:
    """A teacher that guesses at once with one probability, and else writes running sums.

    A guess is off by up to `LARGEST_GUESS_ERROR` either way. In running sums it slips by one with the other
    probability at each step, and goes on from the wrong sum.

    Raises:
        ValueError: no numbers, or a probability outside [0, 1].
    """
    if not numbers or not 0.0 <= slip_probability <= 1.0 or not 0.0 <= guess_probability <= 1.0:
        raise ValueError(
            f"a teacher needs numbers and two probabilities, got {numbers}, {guess_probability}, {slip_probability}"
        )
    if rng.random() < guess_probability:
        return f"#{max(0, sum(numbers) + rng.randint(-LARGEST_GUESS_ERROR, LARGEST_GUESS_ERROR))}"
    sums: list[int] = []
    running = 0
    for number in numbers:
        running += number
        if rng.random() < slip_probability:
            running += rng.choice((-1, 1))
        sums.append(running)
    return ",".join(str(value) for value in sums) + f"#{running}"
