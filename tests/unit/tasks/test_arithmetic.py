import random

import pytest

from asyppo_async.errors import TaskError
from asyppo_async.tasks.arithmetic import (
    ALPHABET,
    ArithmeticTask,
    final_number,
    question_text,
    teacher_response,
)
from asyppo_async.tasks.protocol import TaskSpec
from asyppo_async.tasks.registry import create_task
from asyppo_async.types import Prompt


class CharacterTokenizer:
    chat_template: str | None = None
    unk_token_id: int | None = 0
    bos_token_id: int | None = None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ALPHABET.find(character) + 1 for character in text]

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        raise AssertionError("a tokenizer without a template was asked for a chat")


class ChatTokenizer(CharacterTokenizer):
    chat_template = "yes"
    unk_token_id = None

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize and add_generation_prompt
        turns = [f"<{message['role']}>{message['content']}" for message in conversation]
        return "".join([*turns, "<assistant>"])


def spec(**params: int) -> TaskSpec:
    return TaskSpec(name="arithmetic", seed=3, system_prompt="", params=params)


def prompt(answer: str) -> Prompt:
    return Prompt(id="p", task="arithmetic", text="", token_ids=(), answer=answer)


def test_prompts_when_made_twice_then_are_equal_and_a_smaller_number_is_a_prefix() -> None:
    first = create_task(spec()).prompts("train", 200, CharacterTokenizer())
    again = create_task(spec()).prompts("train", 500, CharacterTokenizer())
    assert len(first) == 200
    assert first == again[:200]
    assert len({made.id for made in again}) == 500


def test_splits_when_drawn_with_any_seed_then_share_no_text() -> None:
    train = {
        made.text
        for seed in range(3)
        for made in ArithmeticTask.from_spec(
            TaskSpec(
                name="arithmetic", seed=seed, system_prompt="", params={"min_numbers": 2, "max_numbers": 3}
            )
        ).prompts("train", 300, CharacterTokenizer())
    }
    heldout = {
        made.text
        for made in create_task(spec(min_numbers=2, max_numbers=3)).prompts(
            "heldout", 120, CharacterTokenizer()
        )
    }
    assert len(heldout) == 120
    assert not train & heldout


def test_prompts_when_more_are_wanted_than_exist_then_error_says_how_many_there_are() -> None:
    # Two one-digit numbers from 1 to 9 make 81 questions over both splits.
    with pytest.raises(TaskError, match=r"only \d+ different train prompts .* 90 are wanted"):
        create_task(spec(min_numbers=2, max_numbers=2)).prompts("train", 90, CharacterTokenizer())


def test_prompt_when_tokenized_then_has_one_token_a_character_and_the_sum_as_answer() -> None:
    for made in create_task(spec()).prompts("train", 50, CharacterTokenizer()):
        numbers = made.text.removesuffix("=").split("+")
        assert 4 <= len(numbers) <= 7
        assert len(made.token_ids) == len(made.text) == 2 * len(numbers)
        assert made.answer == str(sum(int(number) for number in numbers))


def test_prompt_when_the_tokenizer_has_a_template_then_system_and_question_go_through_it() -> None:
    task = create_task(TaskSpec(name="arithmetic", seed=0, system_prompt="Add.", params={}))
    made = task.prompts("train", 1, ChatTokenizer())[0]
    assert made.text.startswith("<system>Add.<user>")
    assert made.text.endswith("=<assistant>")


def test_prompt_when_a_character_is_not_in_the_vocabulary_then_error_shows_it() -> None:
    task = create_task(TaskSpec(name="arithmetic", seed=0, system_prompt="Add: ", params={}))
    with pytest.raises(TaskError, match="cannot write"):
        task.prompts("train", 1, CharacterTokenizer())


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("3,11,16,25#25", 1.0),
        ("3,12,16,24#25", 1.0),
        ("#25", 1.0),
        ("3,11,16,25#24", -1.0),
        ("3,11,16,25,#25", -1.0),
        ("3,11,16,25#25#25", -1.0),
        ("3,11,16,25#025", -1.0),
        ("3,11,16,25#", -1.0),
        ("25", -1.0),
        ("", -1.0),
        ("3,11,,25#25", -1.0),
        ("3,11,16,25#25\n", -1.0),
        ("9" * 10_000 + "#25", -1.0),
    ],
)
def test_score_when_the_final_number_of_a_well_formed_response_is_right_then_is_one(
    text: str, reward: float
) -> None:
    assert create_task(spec()).score(prompt("25"), text) == reward


def test_teacher_when_it_never_slips_then_writes_the_running_sums() -> None:
    assert question_text([3, 8, 5, 9]) == "3+8+5+9="
    response = teacher_response(
        [3, 8, 5, 9], guess_probability=0.0, slip_probability=0.0, rng=random.Random(0)
    )
    assert response == "3,11,16,25#25"


def test_teacher_when_it_guesses_then_is_off_by_up_to_three_and_right_one_time_in_seven() -> None:
    rng = random.Random(0)
    guesses = [
        teacher_response([3, 8, 5, 9], guess_probability=1.0, slip_probability=1.0, rng=rng)
        for _ in range(2000)
    ]
    assert set(guesses) == {f"#{number}" for number in range(22, 29)}
    # Standard error 0.008.
    assert abs(guesses.count("#25") / 2000 - 1 / 7) < 0.03


def test_teacher_when_it_slips_at_each_step_with_p_then_is_right_about_as_often_as_never_slipping() -> None:
    rng = random.Random(0)
    num_right = sum(
        final_number(teacher_response([5, 5, 5, 5], guess_probability=0.0, slip_probability=0.15, rng=rng))
        == "20"
        for _ in range(4000)
    )
    # 0.85^4 = 0.522 without a slip, and slips that cancel: 2 of 4 steps, opposite signs, 6 * .15^2 * .85^2 / 2 = 0.049.
    # Four slips that cancel add less than 0.001. Standard error 0.008.
    assert abs(num_right / 4000 - 0.571) < 0.03


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"min_number": 4}, "no param 'min_number'; did you mean min_numbers"),
        ({"min_numbers": 1}, "must be an int from 2 to 99, got 1"),
        ({"min_numbers": True}, "got True"),
        ({"min_numbers": 5, "max_numbers": 4}, "from 5 to 99, got 4"),
    ],
)
def test_spec_when_a_param_is_wrong_then_error_names_it(params: dict[str, int], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        create_task(spec(**params))
