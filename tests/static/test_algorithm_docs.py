"""The table of methods names presets, functions, keys and tests that exist, and all of the presets."""

import importlib
import re
from pathlib import Path

import pytest

from asyppo_async.config.load import preset_names
from asyppo_async.config.sections import TrainConfig

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8").splitlines()


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, its head left out."""
    start = LINES.index(heading)
    end = next(
        (index for index in range(start + 1, len(LINES)) if LINES[index].startswith("## ")), len(LINES)
    )
    table = [line for line in LINES[start:end] if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table[2:]]


METHODS = rows("## Presets") + rows("## Parts without a preset of their own")
REGISTER = rows("## Choices that the papers leave open")


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("row", METHODS, ids=lambda row: row[0])
def test_row_names_functions_and_tests_that_exist(row: list[str]) -> None:
    functions, tests = quoted(row[3]), quoted(row[4])
    assert functions and tests
    for function in functions:
        module, _, name = function.partition(".")
        found = getattr(importlib.import_module(f"asyppo_async.algorithms.{module}"), name)
        assert callable(found)
    for test in tests:
        assert (ROOT / test).is_file(), test
        assert "def test_" in (ROOT / test).read_text(encoding="utf-8")


def test_every_preset_is_named_and_every_named_one_exists() -> None:
    in_table = [name for row in rows("## Presets") for name in quoted(row[2])]
    text = "\n".join(LINES)
    assert set(in_table) <= set(preset_names())
    for name in preset_names():
        assert f"`{name}`" in text, f"{name} is not in docs/algorithms.md"


def test_every_row_of_the_register_is_there_with_keys_that_exist() -> None:
    assert [row[0] for row in REGISTER] == [str(number) for number in range(1, 46)]
    sections = {name: field.annotation for name, field in TrainConfig.model_fields.items()}
    keys = [key for row in REGISTER for key in quoted(row[3]) if re.fullmatch(r"[a-z]+\.[a-z0-9_]+", key)]
    assert len(keys) > 40
    for key in keys:
        section, _, name = key.partition(".")
        if section == "token_age":  # a function, not a key
            continue
        assert name in sections[section].model_fields, key


PROVEN = rows("## What is proven where")


@pytest.mark.parametrize("row", [*REGISTER, *PROVEN], ids=lambda row: f"{row[0]} {row[1]}")
def test_row_of_the_register_or_of_the_test_list_names_tests_that_exist(row: list[str]) -> None:
    tests = quoted(row[-1])
    assert tests
    for test in tests:
        file, _, name = test.partition("::")
        found = [base / file for base in (ROOT / "tests" / "unit", ROOT / "tests") if (base / file).is_file()]
        assert len(found) == 1, file
        assert f"def {name}(" in found[0].read_text(encoding="utf-8"), test


def test_test_list_has_all_its_items() -> None:
    assert [row[0] for row in PROVEN] == [str(number) for number in range(1, 44)]
