"""The prompts of a run: lengths, right answers, several tasks, and what the summary says of them."""

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from asyppo_async.config.load import config_from_tree
from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import ConfigError, TaskError
from asyppo_async.tasks.prompting import encode_prompt
from asyppo_async.tasks.protocol import TaskSpec
from asyppo_async.trainer.coordinator.mixed_sampler import open_sampler
from asyppo_async.trainer.material import Material, load_tokenizer, open_material, read_material
from tests.unit.trainer.conftest import write_rows


def config_of(models: Path, *overrides: str, **task: object) -> TrainConfig:
    tree: dict[str, object] = {
        "actor": {"model": str(models / "actor")},
        "critic": {"model": str(models / "critic")},
        "task": task,
    }
    return config_from_tree(tree, overrides)


def sums(folder: Path, answers: list[object]) -> Path:
    rows = [{"prompt": f"{n}+1=", "answer": answer} for n, answer in enumerate(answers)]
    return write_rows(folder / "rows.jsonl", rows)


def on_rows(path: Path, **data: object) -> dict[str, object]:
    """The settings of a data task that the tiny vocabulary can write."""
    return {
        "name": "data",
        "data": {"path": str(path), "heldout_share": 0.3, **data},
        "chat_template": "none",
        "prompt_template": "{prompt}",
    }


def read(models: Path, *overrides: str, **task: object) -> Material:
    return read_material(config_of(models, *overrides, **task))


@pytest.mark.report("P49")
def test_prompts_when_longer_than_the_bound_then_are_left_out_and_counted(tiny_models: Path) -> None:
    params = {"min_numbers": 2, "max_numbers": 9}
    limits = ("task.max_prompt_tokens=10", "task.num_train=300", "task.num_heldout=100")
    material = read(tiny_models, *limits, params=params)
    (task,) = material.tasks
    lengths = [len(prompt.token_ids) for prompt in material.train.values()]
    assert max(lengths) <= 10 and len(lengths) < 300
    num_left_out = 400 - len(lengths) - len(material.heldout)
    assert task.left_out == {"longer than 10 tokens": num_left_out} and num_left_out > 100
    assert f"{num_left_out} left out (longer than 10 tokens)" in str(task)
    assert task.row()["left_out"] == dict(task.left_out)


def test_prompts_when_all_are_too_long_then_error_names_the_shortest_and_the_remedy(
    tiny_models: Path,
) -> None:
    with pytest.raises(
        TaskError, match=r"all 100 train prompts are longer than 3 tokens, the shortest has \d+; use"
    ):
        read(tiny_models, "task.max_prompt_tokens=3", "task.num_train=100")


def test_response_when_it_leaves_no_room_for_a_prompt_then_error_names_the_model_or_the_server(
    tiny_models: Path,
) -> None:
    with pytest.raises(
        ConfigError, match=r"sampling.max_tokens \(100000\) .* exceed the \d+ tokens that actor.model"
    ):
        read(tiny_models, "sampling.max_tokens=100000")
    with pytest.raises(
        ConfigError, match=r"60 tokens \(task.max_prompt_tokens\) exceed the 64 tokens that fleet"
    ):
        read(tiny_models, "sampling.max_tokens=24", "task.max_prompt_tokens=60", "fleet.max_model_len=64")


@pytest.mark.report("P68")
async def test_rows_when_their_answer_cannot_be_verified_then_are_refused_with_file_and_line(
    tiny_models: Path, tmp_path: Path
) -> None:
    path = sums(tmp_path, [1, 2, "?", 4, "1-1/\\mathrm{e}", 6, "\\frac{7}{1}", 8, 9, 10, 11, 12])
    with pytest.raises(
        TaskError, match=r"rows.jsonl:[35] \('.*\), .*rows.jsonl:[35] .*bad_answers = \"skip\""
    ):
        await open_material(config_of(tiny_models, **on_rows(path)))
    material = await open_material(config_of(tiny_models, **on_rows(path, bad_answers="skip")))
    (task,) = material.tasks
    assert task.left_out == {"answer not verified against itself": 2}
    answers = {prompt.answer for prompt in (*material.train.values(), *material.heldout)}
    assert len(answers) == 10 and "?" not in answers and "\\frac{7}{1}" in answers


async def test_rows_when_their_answer_takes_too_long_to_read_then_are_refused_within_the_limit(
    tiny_models: Path, tmp_path: Path
) -> None:
    endless = "1" + "+x^{2}" * 20_000
    path = sums(tmp_path, [1, 2, 3, endless, 5, 6, 7, 8, 9, 10])
    config = config_of(tiny_models, "task.reward_timeout_s=1", **on_rows(path))
    with pytest.raises(TaskError, match=r"rows.jsonl:4 \('1\+x"):
        await open_material(config)


def test_mix_when_read_then_keeps_tasks_apart_and_interleaves_what_is_held_out(
    tiny_models: Path, tmp_path: Path
) -> None:
    path = sums(tmp_path, list(range(1, 41)))
    mix = [
        {"name": "arithmetic", "label": "long", "num_train": 30, "num_heldout": 20, "weight": 3},
        {**on_rows(path), "label": "short"},
    ]
    material = read(tiny_models, mix=mix)
    assert [share.label for share in material.shares] == ["long", "short"]
    assert {prompt.task for prompt in material.heldout[:4]} == {"long", "short"}
    assert len(material.train) == 30 + len(material.tasks[1].train)
    sampler = open_sampler(material.shares, seed=0)
    drawn = [material.train[sampler.next_candidate().prompt_id].task for _ in range(40)]
    assert drawn.count("long") == 30
    again = read(tiny_models, mix=mix)
    assert list(again.train) == list(material.train), "ids are the same after a restart"


def test_rewards_when_mapped_then_the_summary_says_how(tiny_models: Path, tmp_path: Path) -> None:
    path = sums(tmp_path, list(range(40)))
    own = on_rows(path, reward="m:f", score_range="-1..1")
    assert read(tiny_models, **own).tasks[0].row()["reward"] == "R = s of a score s in [-1, 1]"
    assert read(tiny_models).tasks[0].row()["reward"] == "R = 2 s - 1 of a score s in [0, 1]"


def test_think_tags_when_they_are_special_tokens_then_stay_in_the_text_that_is_scored(
    tiny_models: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "actor"
    folder.mkdir()
    for file in (tiny_models / "actor").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens([AddedToken("<think>", special=True), AddedToken("</think>", special=True)])
    tokenizer.save_pretrained(folder)
    material = read(tmp_path, "critic.count=0", "algorithm.estimator=grpo", "algorithm.advantage_mask_share=0",
                    "algorithm.entropy_filter_share=0")  # fmt: skip
    ids = [*tokenizer.encode("<think>1</think>2", add_special_tokens=False), tokenizer.eos_token_id]
    roomy = replace(material, identity=replace(material.identity, vocab_size=len(tokenizer)))
    assert roomy.decode(ids) == "<think>1</think>2"
    with pytest.raises(ValueError, match=f"token id {max(ids)} is not in the actor's vocabulary of"):
        material.decode(ids)


@pytest.mark.report("P31")
@pytest.mark.parametrize("adds_begin", [True, False])
def test_bare_text_when_the_models_tokenizer_begins_it_with_a_token_then_so_does_the_prompt(
    tiny_models: Path, tmp_path: Path, adds_begin: bool
) -> None:
    tokenizer = load_tokenizer(tiny_models / "actor")
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    if adds_begin:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
        )
    bare = TaskSpec(name="data", seed=0, system_prompt="", params={}, chat_template="none")
    begin = (tokenizer.bos_token_id,) if adds_begin else ()
    made = encode_prompt(tokenizer, spec=bare, question="1+2=", answer="3")
    assert made.token_ids == (*begin, *tokenizer.encode("1+2=", add_special_tokens=False))
    assert made.token_ids == tuple(tokenizer.encode("1+2=")), "as every other tool encodes the text"
    template = "<bos>{{ messages[0].content }}"
    chat = encode_prompt(tokenizer, spec=replace(bare, chat_template=template), question="1+2=", answer="3")
    assert chat.token_ids.count(tokenizer.bos_token_id) == 1, "the template has written it"
