import pytest

from asyppo_async.tasks.reasoning import stated_answer
from asyppo_async.tasks.stated import final_answer, last_box, thought_is_open, without_thoughts


@pytest.mark.report("P69")
@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{7}", "7"),
        (r"\boxed{4} or rather \boxed{ 5 }", "5"),
        (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {7}", "7"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{7}. Finally \boxed{", None),
        (r"\boxed{7}. Finally \boxed", None),
        (r"\boxed{7}. Finally \boxed{8", None),
        (r"\boxed{\boxed{7}", None),
        (r"\boxed{7} \boxed{}", None),
        (r"\boxed 7", None),
        (r"\boxed{7\}", None),
        ("7", None),
        ("", None),
    ],
)
def test_last_box_when_any_box_is_not_closed_then_there_is_none(text: str, box: str | None) -> None:
    assert last_box(text) == box


@pytest.mark.parametrize(
    ("text", "opened", "said"),
    [
        ("a<think>b</think>c<think>d</think>e", False, "ace"),
        ("b</think>c", False, "c"),
        ("b</think>c", True, "c"),
        ("b", True, None),
        ("a<think>b", False, None),
        ("b</think>c<think>d", True, None),
        ("<think>a<think>b</think>c", False, "c"),
        ("c", False, "c"),
    ],
)
def test_thoughts_when_tagged_then_nothing_between_the_tags_is_left(
    text: str, opened: bool, said: str | None
) -> None:
    assert without_thoughts(text, opened=opened) == said


def test_final_answer_when_only_a_thought_has_a_box_then_there_is_none() -> None:
    assert final_answer(r"<think>\boxed{7}</think> so it is 7") is None
    assert final_answer(r"<think>\boxed{6}</think>\boxed{7}") == "7"
    assert final_answer(r"\boxed{7}", thought_open=thought_is_open("<user>1+6<assistant><think>\n")) is None
    assert final_answer(r"\boxed{7}", thought_open=thought_is_open("Use <think> tags. 1+6")) == "7"


def test_answer_of_a_generator_when_tagged_boxed_or_bare_then_the_clearest_form_counts() -> None:
    assert stated_answer(r"\boxed{6} <answer>7</answer>") == "7"
    assert stated_answer(r"It is \boxed{7}.") == "7"
    assert stated_answer(r"It is \boxed{7") == ""
    assert stated_answer(" 7 ") == "7"
