import dataclasses

import pytest

from asyppo_async.errors import TaskError
from asyppo_async.tasks.exact_json import dump_exact, load_exact
from asyppo_async.tasks.protocol import JsonValue, Task, TaskSpec
from asyppo_async.tasks.reasoning import stated_answer
from asyppo_async.tasks.registry import create_task


class CodePointTokenizer:
    chat_template = None
    unk_token_id = None
    bos_token_id: int | None = None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        raise AssertionError("a tokenizer without a template was asked for a chat")


def task_named(name: str, **params: JsonValue) -> Task:
    return create_task(TaskSpec(name=name, seed=1, system_prompt="", params=params))


def chain_sum() -> Task:
    return task_named("reasoning_gym:chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1)


def test_chain_sum_when_answered_then_the_librarys_own_score_counts() -> None:
    task = chain_sum()
    made = task.prompts("train", 3, CodePointTokenizer())[0]
    entry = load_exact(made.answer)
    assert isinstance(entry, dict)
    gold = entry["answer"]
    assert entry["question"] == made.text
    assert task.score(made, gold) == 1.0
    assert task.score(made, f"I think <answer> {gold} </answer>") == 1.0
    assert task.score(made, "none") == -1.0
    # The library gives len(gold) / len(text) to a text that contains the answer among others.
    assert task.score(made, f"{gold} is it") == pytest.approx(2 * len(gold) / len(f"{gold} is it") - 1)


def test_splits_of_a_small_generator_when_drawn_then_share_no_text_and_repeat_none() -> None:
    train = [made.text for made in chain_sum().prompts("train", 60, CodePointTokenizer())]
    heldout = [made.text for made in chain_sum().prompts("heldout", 20, CodePointTokenizer())]
    assert len(set(train)) == 60
    assert len(set(heldout)) == 20
    assert not set(train) & set(heldout)


def test_prompts_when_made_twice_then_have_the_same_ids() -> None:
    first = chain_sum().prompts("train", 30, CodePointTokenizer())
    again = chain_sum().prompts("train", 40, CodePointTokenizer())
    assert first == again[:30]


@pytest.mark.parametrize("generator", ["rearc", "spell_backward", "countdown", "n_queens", "zebra_puzzles"])
def test_gold_answer_of_a_generator_when_scored_from_the_stored_entry_then_is_one(generator: str) -> None:
    task = task_named(f"reasoning_gym:{generator}", size=40)
    for made in task.prompts("train", 3, CodePointTokenizer()):
        entry = load_exact(made.answer)
        assert isinstance(entry, dict)
        assert task.score(made, entry["answer"]) == pytest.approx(1.0)


def test_name_when_unknown_then_error_names_near_matches() -> None:
    with pytest.raises(TaskError, match="'chain_sums'; did you mean chain_sum"):
        task_named("reasoning_gym:chain_sums")
    with pytest.raises(TaskError, match="no task 'arithmetics'; did you mean arithmetic"):
        task_named("arithmetics")


def test_params_when_refused_then_error_names_the_key_or_quotes_the_library() -> None:
    with pytest.raises(TaskError, match="no param 'min_term'; did you mean min_terms"):
        task_named("reasoning_gym:chain_sum", min_term=2)
    with pytest.raises(TaskError, match="refuses the params of chain_sum"):
        task_named("reasoning_gym:chain_sum", min_terms=5, max_terms=2)
    with pytest.raises(TaskError, match="no param 'seed'"):
        task_named("reasoning_gym:chain_sum", seed=2)


def test_custom_task_when_its_module_is_missing_then_error_says_what_a_name_must_be() -> None:
    for name in ("custom:no_such_module_here:Task", "custom:json:NoSuchClass", "custom:", "custom:json"):
        with pytest.raises(TaskError, match="custom:MODULE:CLASS"):
            task_named(name)


def test_exact_json_when_loaded_then_gives_back_tuples_and_keys() -> None:
    value = {"a": (1, [2, (3,)]), "b": {1: "x", (2, 3): None}, "__tuple__": 1.5, "c": {"__items__": []}}
    loaded = load_exact(dump_exact(value))
    assert loaded == value
    with pytest.raises(TaskError, match="plain values, got set"):
        dump_exact({"a": {1, 2}})
    with pytest.raises(TaskError, match="no JSON document"):
        load_exact("{")


def test_stated_answer_when_several_are_tagged_then_is_the_last() -> None:
    assert stated_answer("<answer>1</answer> no <answer>\n2 </answer>.") == "2"
    assert stated_answer("  7\n") == "7"


def test_spec_when_equal_then_makes_equal_prompts_in_another_instance() -> None:
    spec = TaskSpec(name="reasoning_gym:chain_sum", seed=5, system_prompt="Q: ", params={"max_terms": 3})
    made = create_task(spec).prompts("heldout", 5, CodePointTokenizer())
    assert made == create_task(dataclasses.replace(spec)).prompts("heldout", 5, CodePointTokenizer())
    assert all(prompt.text.startswith("Q: ") for prompt in made)
