"""math-verify as we use it: what it grades wrongly is written down with the value expected."""

import dataclasses
import json
from pathlib import Path

import pytest

from asyppo_async.config.task import DataSection
from asyppo_async.tasks.mathematics import can_be_verified, clean_gold, is_right
from asyppo_async.tasks.protocol import Task, TaskSpec
from asyppo_async.tasks.registry import create_task
from tests.unit.tasks.fakes import BareTokenizer


def math_task(folder: Path, gold: str, **settings: str) -> Task:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}?", "answer": gold}) + "\n" for n in range(40)))
    section = DataSection.model_validate({"path": file, "heldout_share": 0.5, **settings})
    spec = TaskSpec(
        name="data", seed=0, system_prompt="", params=section.model_dump(mode="json"), chat_template="none"
    )
    return create_task(spec, scoring=True)


@pytest.mark.parametrize(
    ("gold", "response", "reward"),
    [
        ("7", r"3 + 4 = 7, so \boxed{7}", 1.0),
        ("7", r"\boxed{7.0}", 1.0),
        ("7", r"\boxed{x = 7}", 1.0),
        ("7", r"\boxed{8}", -1.0),
        ("7", "The answer is 7", -1.0),
        ("7", r"\boxed{7} no, \boxed{8}", -1.0),
        ("7", r"\boxed{8} no, \boxed{7}", 1.0),
        ("7", r"\boxed{7}. Finally \boxed{", -1.0),
        ("7", r"<think>\boxed{7}</think> \boxed{8}", -1.0),
        ("7", r"<think>\boxed{8}</think> \boxed{7}", 1.0),
        ("7", r"<think>It is \boxed{7}", -1.0),
        ("7", r"hm</think> \boxed{7}", 1.0),
        ("7", "", -1.0),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1.0),
        (r"\frac{1}{2}", r"\boxed{\dfrac{2}{4}}", 1.0),
        ("$x^2+1$", r"\boxed{1 + x^2}", 1.0),
        ("$x^2+1$", r"\boxed{x^2 - 1}", -1.0),
        ("1000", r"\boxed{1,000}", 1.0),
        (r"so it is \boxed{50\%}", r"\boxed{0.5}", 1.0),
        (r"\left(3,\frac{\pi}{2}\right)", r"\boxed{(3,\pi/2)}", 1.0),
        ("7", r"\boxed{\text{seven apples}}", -1.0),
    ],
)
def test_reward_of_a_response_when_its_last_box_is_right_then_is_one(
    tmp_path: Path, gold: str, response: str, reward: float
) -> None:
    task = math_task(tmp_path, gold)
    (made,) = task.prompts("train", 1, BareTokenizer())
    assert task.score(made, response) == reward


def test_reward_when_the_prompt_ends_within_a_thought_then_only_what_follows_it_counts(
    tmp_path: Path,
) -> None:
    task = math_task(tmp_path, "7")
    (made,) = task.prompts("train", 1, BareTokenizer())
    thinking = dataclasses.replace(made, text=made.text + "<think>\n")
    assert task.score(thinking, r"\boxed{7}") == -1.0
    assert task.score(thinking, r"\boxed{8}</think>\boxed{7}") == 1.0


def test_exact_rule_when_the_text_differs_then_is_wrong_even_if_the_value_is_equal(tmp_path: Path) -> None:
    task = math_task(tmp_path, "1/2", reward="exact")
    (made,) = task.prompts("train", 1, BareTokenizer())
    assert task.score(made, r"\boxed{ 1/2 }") == 1.0
    assert task.score(made, r"\boxed{0.5}") == -1.0


@pytest.mark.report("P67")
def test_verifier_when_gold_and_answer_change_places_then_grades_differently() -> None:
    assert is_right(r"-2 \le x \le 7", r"x \in [-2,7]")
    assert not is_right(r"x \in [-2,7]", r"-2 \le x \le 7")


@pytest.mark.report("P68")
@pytest.mark.parametrize(
    ("gold", "stated", "right"),
    [
        # Reported false positives, and what becomes of them here.
        ("1/2^{99}", "1/2^{98}", False),
        (r"1-\frac{1}{e}", r"1+\frac{1}{e}", False),
        ("4", r"4\sqrt(2)", False),
        ("4", r"4\sqrt{2}", False),
        ("3*x-1*y+13=0", "3x + 4y + 14=0", False),
        ("1331 and 1728", "1728", False),
        ("1331, 1728", "1728", False),
        ("listen", "silent", False),
        # Accepted on purpose, or for want of better.
        ("50%", "0.5", True),
        ("1/3", "0.333333", True),
        ("1/3", "0.333", False),
        ("5 cm", "5", True),
        ("7", "x=7", True),
        # Reported false negatives.
        ("2/3", r"\frac{2}{3}", True),
        ("13", r"\text{13}", True),
        ("(3, 4)", "(3,4)", True),
        (r"\text{Evelyn}", "evelyn", True),
    ],
)
def test_verifier_when_a_pair_was_reported_then_grades_as_written_here(
    gold: str, stated: str, right: bool
) -> None:
    assert is_right(gold, stated) is right


@pytest.mark.report("P68")
@pytest.mark.parametrize(
    ("gold", "checkable"),
    [
        ("7", True), ("-3.50", True), (r"\frac{1}{2}", True), ("x^2+1", True), ("Evelyn", True), ("(1, 2)", True),
        (r"1-1/\mathrm{e}", False), (r"\frac{1}{", False), ("?", False), ("", False),
    ],
)  # fmt: skip
def test_gold_when_the_verifier_reads_it_as_nothing_then_cannot_be_verified(
    gold: str, checkable: bool
) -> None:
    assert can_be_verified(gold) is checkable


def test_plain_numbers_when_taken_without_a_check_then_the_verifier_agrees() -> None:
    for number in ("0", "7", "-12", "+3", "0.5", "1234567", "3.1400"):
        assert is_right(number, f"{number} ") and is_right(f"{number}+0", number)


def test_gold_when_wrapped_as_data_sets_do_then_is_cleaned() -> None:
    assert clean_gold(" $7$ ") == "7"
    assert clean_gold("$$x$$") == "x"
    assert clean_gold(r"We get $\boxed{\frac{1}{2}}$.") == r"\frac{1}{2}"
    assert clean_gold("$") == "$"
