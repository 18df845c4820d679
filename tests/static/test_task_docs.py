"""The examples of docs/tasks.md are configurations that load, and its Python is Python."""

import ast
import re
import tomllib
from pathlib import Path

from asyppo_async.config.load import config_from_tree

TEXT = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_examples_of_the_task_docs_load() -> None:
    assert len(blocks("toml")) == 3
    for block in blocks("toml"):
        tree = {"actor": {"model": "a"}, "critic": {"model": "c"}, **tomllib.loads(block)}
        assert config_from_tree(tree).task.entries


def test_reward_of_the_task_docs_does_what_it_says() -> None:
    (block,) = blocks("python")
    assert isinstance(ast.parse(block), ast.Module)
    names: dict[str, object] = {}
    exec(block, names)
    short = names["short"]
    assert callable(short)
    assert (short({"topic": "tea"}, "tea is hot"), short({"topic": "tea"}, "x" * 500)) == (1.0, 0.0)


def test_constants_of_the_task_docs_are_those_of_the_code() -> None:
    from asyppo_async.trainer.coordinator.rewards import ALL_FAILED_AT_FIRST

    assert f"first {ALL_FAILED_AT_FIRST} rewards" in TEXT
