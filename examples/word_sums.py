"""Writes a data set of sums asked in words: `python examples/word_sums.py --out data/word_sums.jsonl [--seed 0]`.

One JSON object per line, as the task `data` reads it: `messages`, a chat that ends with the question, and `answer` as
digits. The same seed writes the same file.
"""

import argparse
import json
import random
from pathlib import Path

WORDS = ("zero", "one", "two", "three", "four", "five", "six")
QUESTIONS = (
    "What is {a} plus {b}?",
    "Add {a} and {b}.",
    "How much is the sum of {a} and {b}?",
    "A basket holds {a} apples, and {b} more are put in. How many apples does it hold?",
    "Ann has {a} stamps and Ben has {b}. How many stamps do they have together?",
)


EXAMPLES = ((2, 5), (4, 1), (3, 3))
LARGEST = 6


def rows(num: int, seed: int) -> list[dict[str, object]]:
    """`num` different questions, each behind the worked examples: a small model has to see what a box looks like."""
    shown = [
        turn
        for a, b in EXAMPLES
        for turn in (
            {"role": "user", "content": QUESTIONS[0].format(a=WORDS[a], b=WORDS[b])},
            {"role": "assistant", "content": f"{a} + {b} = \\boxed{{{a + b}}}"},
        )
    ]
    every: list[dict[str, object]] = [
        {
            "messages": [*shown, {"role": "user", "content": question.format(a=WORDS[a], b=WORDS[b])}],
            "answer": str(a + b),
        }
        for question in QUESTIONS
        for a in range(1, LARGEST + 1)
        for b in range(1, LARGEST + 1)
    ]
    return random.Random(seed).sample(every, num)


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes sums asked in words as JSON lines.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in rows(arguments.rows, arguments.seed)]
    arguments.out.write_text("".join(lines), encoding="utf-8")
    print(f"{arguments.out}: {len(lines)} sums in words")


if __name__ == "__main__":
    main()
