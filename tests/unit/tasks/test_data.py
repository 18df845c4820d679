"""The task `data`: prompts, templates, splits and the user's own reward function."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from asyppo_async.config.task import DataSection
from asyppo_async.errors import TaskError
from asyppo_async.tasks.data import BOXED, DataTask
from asyppo_async.tasks.protocol import TaskSpec
from tests.unit.tasks.fakes import BareTokenizer, ChatTokenizer

REWARDS = """
calls = []

def share(row, response):
    calls.append((row, response))
    return len(response) / 10

def right(row, response):
    return response == row["answer"]

def text(row, response):
    return "1.0"

no_function = 3
"""


def write(folder: Path, rows: list[dict[str, object]], name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums(num: int) -> list[dict[str, object]]:
    return [{"prompt": f"{n}+1=", "answer": f"{n + 1}"} for n in range(num)]


def task_on(
    path: Path, *, scoring: bool = False, chat: str = "auto", template: str = "{prompt}", system: str = "",
    **settings: object,
) -> DataTask:  # fmt: skip
    section = DataSection.model_validate({"path": path, **settings})
    spec = TaskSpec(
        name="data", label="sums", seed=0, system_prompt=system, params=section.model_dump(mode="json"),
        prompt_template=template, chat_template=chat,
    )  # fmt: skip
    return DataTask.from_spec(spec, scoring=scoring)


def test_prompts_when_made_then_go_through_both_templates_and_know_their_line(tmp_path: Path) -> None:
    task = task_on(write(tmp_path, sums(30)), template=BOXED, system="Be brief.")
    made = task.prompts("train", 100, ChatTokenizer())
    first = made[0]
    number = int(first.answer) - 1
    assert first.text == (
        f"<system>Be brief.<user>{number}+1=\n\nPlease reason step by step, and put your final answer within "
        "\\boxed{}.<assistant>"
    )
    assert first.source == f"{tmp_path / 'rows.jsonl'}:{number + 1}"
    assert first.id.startswith("sums/") and first.task == "sums"


def test_prompts_when_rows_move_or_come_twice_then_ids_stay_and_repetitions_go(tmp_path: Path) -> None:
    rows = sums(30)
    before = task_on(write(tmp_path, rows)).prompts("train", 100, ChatTokenizer())
    moved = [*rows[10:], *rows[:10], rows[3]]
    after = task_on(write(tmp_path, moved, "moved.jsonl")).prompts("train", 100, ChatTokenizer())
    assert {made.id for made in before} == {made.id for made in after}
    assert len(before) == len(after) == len({made.id for made in after})


def test_splits_when_by_share_then_are_disjoint_and_cover_all_rows(tmp_path: Path) -> None:
    task = task_on(write(tmp_path, sums(400)), heldout_share=0.25)
    train = {made.id for made in task.prompts("train", 1000, ChatTokenizer())}
    heldout = {made.id for made in task.prompts("heldout", 1000, ChatTokenizer())}
    assert not train & heldout and len(train | heldout) == 400
    assert 60 < len(heldout) < 140  # mean 100, standard error 8.7
    assert len(task.prompts("heldout", 7, ChatTokenizer())) == 7


def test_splits_when_by_file_then_shared_questions_are_only_held_out(tmp_path: Path) -> None:
    test_file = write(tmp_path, [*sums(3), {"prompt": "other", "answer": 1}], "test.jsonl")
    task = task_on(write(tmp_path, sums(10)), heldout_path=test_file)
    assert len(task.prompts("heldout", 100, ChatTokenizer())) == 4
    assert [made.answer for made in task.prompts("train", 100, ChatTokenizer())] == [
        str(number + 1) for number in range(3, 10)
    ]


def test_split_when_no_row_falls_to_it_then_error_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"no heldout rows.*heldout_path"):
        task_on(write(tmp_path, sums(1)), heldout_share=1e-9).prompts("heldout", 5, ChatTokenizer())


def test_messages_when_given_as_rows_then_are_the_chat_and_the_template_is_around_the_last(
    tmp_path: Path,
) -> None:
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "1+1?"},
    ]
    file = write(tmp_path, [{"q": {"messages": turns}, "a": 2}])
    settings = {"prompt_column": "q.messages", "answer_column": "a", "heldout_path": file, "chat": "auto"}
    task = task_on(file, template="[{prompt}]", system="S", **settings)
    (made,) = task.prompts("heldout", 1, ChatTokenizer())
    assert made.text == "<system>S<user>Hi<assistant>Hello<user>[1+1?]<assistant>"
    with pytest.raises(
        TaskError, match=r"rows.jsonl:1: a prompt of several chat messages needs a chat template"
    ):
        task_on(file, **{**settings, "chat": "none"}).prompts("heldout", 1, ChatTokenizer())


def test_chat_template_when_missing_then_error_says_what_can_be_done(tmp_path: Path) -> None:
    file = write(tmp_path, sums(30))
    with pytest.raises(TaskError, match=r"task sums: the tokenizer has no chat template; name a Jinja file"):
        task_on(file).prompts("train", 1, BareTokenizer())
    (bare,) = task_on(file, chat="none", system="S: ").prompts("train", 1, ChatTokenizer())
    assert bare.text.startswith("S: ") and bare.text.endswith("+1=")
    (own,) = task_on(file, chat="{{ messages }}").prompts("train", 1, ChatTokenizer())
    assert own.text.startswith("{{ messages }}<user>")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a"}, r"rows.jsonl:2 has no column 'answer'; it has: prompt"),
        ({"question": "a", "answer": 1}, r"rows.jsonl:2 has no column 'prompt'"),
        ({"prompt": "", "answer": 1}, r"rows.jsonl:2: column 'prompt' must be a text or a list of messages"),
        (
            {"prompt": [{"role": "user"}], "answer": 1},
            r"rows.jsonl:2: column 'prompt' must be a text or a list",
        ),
        ({"prompt": 7, "answer": 1}, r"rows.jsonl:2: column 'prompt' must be a text"),
        (
            {"prompt": "a", "answer": None},
            r"rows.jsonl:2: column 'answer' must be a text or a number, got None",
        ),
        ({"prompt": "a", "answer": " "}, r"rows.jsonl:2: column 'answer' holds no answer"),
        ({"prompt": "a", "answer": r"\boxed{"}, r"rows.jsonl:2: column 'answer' holds no answer"),
    ],
)
def test_row_when_a_column_is_missing_or_wrong_then_error_names_file_and_line(
    tmp_path: Path, row: dict[str, object], words: str
) -> None:
    file = write(tmp_path, [*sums(1), row])
    with pytest.raises(TaskError, match=words):
        task_on(file, heldout_path=file).prompts("heldout", 10, ChatTokenizer())


def test_answer_when_it_stands_behind_a_mark_then_only_that_is_taken(tmp_path: Path) -> None:
    file = write(tmp_path, [{"prompt": "a", "answer": "3 #### 4 = 4\n#### 1,000"}])
    (made,) = task_on(file, heldout_path=file, answer_after="####").prompts("heldout", 1, ChatTokenizer())
    assert made.answer == "1,000"


@pytest.fixture
def reward_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards_of_a_test.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("my_rewards_of_a_test", None)


@pytest.mark.usefixtures("reward_module")
def test_own_reward_when_called_then_gets_the_whole_row_and_is_mapped(tmp_path: Path) -> None:
    file = write(tmp_path, [{"prompt": "a", "level": 3}])
    own = "my_rewards_of_a_test:share"
    reader = task_on(file, heldout_path=file, reward=own)
    (made,) = reader.prompts("heldout", 1, ChatTokenizer())
    scorer = task_on(file, scoring=True, heldout_path=file, reward=own)
    assert scorer.score(made, "12345") == 0.0
    assert scorer.score(made, "0123456789") == 1.0
    module = sys.modules["my_rewards_of_a_test"]
    assert module.calls[0] == ({"prompt": "a", "level": 3}, "12345")
    signed = task_on(file, scoring=True, heldout_path=file, reward=own, score_range="-1..1")
    assert signed.score(made, "12345") == 0.5
    with pytest.raises(TaskError, match=r"must return a finite number in 0..1, got float 1.1"):
        scorer.score(made, "01234567890")


@pytest.mark.usefixtures("reward_module")
def test_own_reward_when_it_gives_a_truth_value_then_counts_and_a_text_does_not(tmp_path: Path) -> None:
    file = write(tmp_path, [{"prompt": "a", "answer": "2"}])
    task = task_on(file, scoring=True, heldout_path=file, reward="my_rewards_of_a_test:right")
    (made,) = task.prompts("heldout", 1, ChatTokenizer())
    assert (task.score(made, "2"), task.score(made, "3")) == (1.0, -1.0)
    text = task_on(file, scoring=True, heldout_path=file, reward="my_rewards_of_a_test:text")
    with pytest.raises(TaskError, match=r"must return a finite number in 0..1, got str '1.0'"):
        text.score(dataclasses.replace(made), "2")


@pytest.mark.usefixtures("reward_module")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module_here:f", "ModuleNotFoundError"),
        ("my_rewards_of_a_test:nothing", "AttributeError"),
        ("my_rewards_of_a_test:no_function", "is no function but int"),
    ],
)
def test_own_reward_when_it_cannot_be_loaded_then_error_says_why(
    tmp_path: Path, name: str, words: str
) -> None:
    with pytest.raises(TaskError, match=words):
        task_on(write(tmp_path, sums(1)), scoring=True, reward=name)
